"""The strategies: classes that choose devices and share all other behavior."""

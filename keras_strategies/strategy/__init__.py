"""The strategies: thin shells that choose devices for one behaviour."""

"""Strategies: thin classes that choose devices and share their behaviour."""

"""Strategies: thin classes that choose devices for one shared behaviour."""

"""Candidates compiled for shapes, and the figures of their programs."""

"""Classifies traced values by how they depend on the rows of a batch."""

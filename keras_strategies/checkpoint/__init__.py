"""Checkpoints that a run goes on from, bit for bit, and that are checked."""

"""Loops of one's own against fit, and against loops by hand."""

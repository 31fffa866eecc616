"""Gradients that an optimizer accumulates, summed once per update."""

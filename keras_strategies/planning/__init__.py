"""Plans training on TPU slices: memory, collectives and time per candidate."""

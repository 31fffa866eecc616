"""Plans of training on slices: bytes, collectives and times of candidates."""

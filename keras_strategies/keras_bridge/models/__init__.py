"""Models that are like another one: shorter, or without values."""

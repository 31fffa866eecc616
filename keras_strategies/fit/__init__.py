"""`fit`, `evaluate` and `predict` of a model that a strategy distributes."""

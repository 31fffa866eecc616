"""Equal blocks of a model: how they are found and computed in a loop."""

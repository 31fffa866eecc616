"""Models that tests make."""

import keras


def chain(shape, *layers, **options):
    """A sequential model of these layers, for inputs of a shape."""
    return keras.Sequential([keras.Input(shape), *layers], **options)

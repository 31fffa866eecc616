"""Models that tests make."""

import keras


def chain(shape, *layers, **options):
    """A sequential model of these layers, for inputs of a shape."""
    return keras.Sequential([keras.Input(shape), *layers], **options)


def compiled_in(strategy, build, *args, **kwargs):
    """A model that is built and compiled in a strategy's scope."""
    with strategy.scope():
        model = build()
        model.compile(*args, **kwargs)
    return model

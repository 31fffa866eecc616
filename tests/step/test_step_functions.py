"""Warnings about how steps are compiled."""

import warnings

import keras
import numpy as np
import pytest

from tests.support.plain_keras import mirrored


def fit_with(layer: keras.layers.Layer, **kwargs: object) -> None:
    with mirrored(2).scope():
        model = keras.Sequential(
            [keras.Input((4, 4, 1)), layer, keras.layers.Flatten()]
        )
        model.compile("sgd", "mse", **kwargs)
    model.fit(np.ones((8, 4, 4, 1)), np.ones((8, 16)), verbose=0)


def test_layers_that_keras_does_not_compile_are_no_reason_to_warn():
    layer = keras.layers.RandomZoom(0.1)
    assert not layer.supports_jit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_with(layer)


def test_an_option_without_effect_is_a_reason_to_warn():
    with pytest.warns(UserWarning, match="jit_compile=False"):
        fit_with(keras.layers.Dense(1), jit_compile=False)

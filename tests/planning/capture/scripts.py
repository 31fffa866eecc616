"""Beginnings of scripts that are planned."""

HEAD = """
import keras
import numpy as np
import keras_strategies as ks
"""
MODEL = """
with strategy.scope():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
    model.compile("adam", "mse")
x, y = np.zeros((50, 40), "float32"), np.zeros((50, 30), "float32")
"""
MIRRORED = HEAD + "strategy = ks.MirroredStrategy()\n" + MODEL

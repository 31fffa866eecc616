"""The command `keras-strategies`."""

from keras_strategies.cli.main import main as main

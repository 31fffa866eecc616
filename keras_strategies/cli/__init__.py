"""The command-line tool `keras-strategies`."""

from keras_strategies.cli.main import main as main

"""The names, for type checkers; `_MODULES` has where they are."""

from keras_strategies.callbacks.checkpoint import Checkpoint as Checkpoint
from keras_strategies.callbacks.scalars import Scalars as Scalars

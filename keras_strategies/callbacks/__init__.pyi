"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies.callbacks.checkpoint import Checkpoint as Checkpoint
from keras_strategies.callbacks.scalars import Scalars as Scalars
from keras_strategies.reporting.run_report import RunReport as RunReport

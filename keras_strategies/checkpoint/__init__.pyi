"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies.checkpoint.directory.files import (
    DamagedCheckpoint as DamagedCheckpoint,
)
from keras_strategies.checkpoint.directory.retention import Keep as Keep
from keras_strategies.checkpoint.manager import (
    CheckpointManager as CheckpointManager,
)
from keras_strategies.checkpoint.objects import Checkpoint as Checkpoint
from keras_strategies.checkpoint.weights import (
    latest_checkpoint as latest_checkpoint,
)
from keras_strategies.checkpoint.weights import load_weights as load_weights

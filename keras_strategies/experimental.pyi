"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies.kernels.blocked_head import blocked_head as blocked_head
from keras_strategies.kernels.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from keras_strategies.kernels.scanned_blocks import scan_blocks as scan_blocks
from keras_strategies.strategy.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.strategy.replica_context import (
    ValueContext as ValueContext,
)
from keras_strategies.strategy.tf_compat.options import (
    CommunicationImplementation as CommunicationImplementation,
)
from keras_strategies.strategy.tf_compat.options import (
    CommunicationOptions as CommunicationOptions,
)
from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy
from keras_strategies.variables.partitioners import FullySharded as FullySharded
from keras_strategies.variables.partitioners import Replicated as Replicated
from keras_strategies.variables.partitioners import SlotsOnly as SlotsOnly
from keras_strategies.variables.transformer_layout import (
    transformer_layout as transformer_layout,
)

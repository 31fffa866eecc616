"""Names of `tf.distribute.experimental`, for those who move from there.

    options = ks.experimental.CommunicationOptions(timeout_seconds=120)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)

Differs from tf: `experimental.MultiWorkerMirroredStrategy` takes the arguments
of `MultiWorkerMirroredStrategy`, and no `communication` first.
"""

from typing import TYPE_CHECKING

from keras_strategies._core.names import tf_names as _tf_names
from keras_strategies._core.names.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from keras_strategies.keras_bridge.variables.partitioners import (
        FullySharded as FullySharded,
    )
    from keras_strategies.keras_bridge.variables.partitioners import (
        SlotsOnly as SlotsOnly,
    )
    from keras_strategies.strategy.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from keras_strategies.strategy.replica_context import (
        ValueContext as ValueContext,
    )
    from keras_strategies.strategy.tf_compat.communication import (
        CommunicationImplementation as CommunicationImplementation,
    )
    from keras_strategies.strategy.tf_compat.communication import (
        CommunicationOptions as CommunicationOptions,
    )
    from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy

_MODULES = {
    "CommunicationImplementation": "strategy.tf_compat.communication",
    "CommunicationOptions": "strategy.tf_compat.communication",
    "FullySharded": "keras_bridge.variables.partitioners",
    "MultiWorkerMirroredStrategy": "strategy.multi_worker",
    "SlotsOnly": "keras_bridge.variables.partitioners",
    "TPUStrategy": "strategy.tpu",
    "ValueContext": "strategy.replica_context",
}

__getattr__, __dir__ = _lazy_names(
    __name__, "keras_strategies", _MODULES, _tf_names.EXPERIMENTAL
)

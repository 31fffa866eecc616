"""The public names that correspond to `tf.distribute.experimental`.

    options = ks.experimental.CommunicationOptions(timeout_seconds=120)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)

Differs from tf: `experimental.MultiWorkerMirroredStrategy` accepts the same
arguments as `MultiWorkerMirroredStrategy`. It has no argument `communication`,
which is the first argument in TensorFlow.
"""

from keras_strategies.names.lazy_names import EXPERIMENTAL as _INSTEAD
from keras_strategies.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "CommunicationImplementation": "strategy.tf_compat.options",
    "CommunicationOptions": "strategy.tf_compat.options",
    "FullySharded": "variables.partitioners",
    "MultiWorkerMirroredStrategy": "strategy.multi_worker",
    "Replicated": "variables.partitioners",
    "SlotsOnly": "variables.partitioners",
    "TPUStrategy": "strategy.tpu",
    "ValueContext": "strategy.replica_context",
    "blocked_head": "kernels.blocked_head",
    "linear_cross_entropy": "kernels.linear_cross_entropy",
    "scan_blocks": "kernels.scanned_blocks",
    "transformer_layout": "variables.transformer_layout",
}

__getattr__, __dir__ = _lazy_names(
    __name__, "keras_strategies", _MODULES, _INSTEAD
)

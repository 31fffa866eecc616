"""Names of `tf.distribute.experimental`, for those who move from there.

    options = ks.experimental.CommunicationOptions(timeout_seconds=120)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)

Differs from tf: `experimental.MultiWorkerMirroredStrategy` takes the arguments
of `MultiWorkerMirroredStrategy`, and no `communication` first.
"""

from keras_strategies.strategy.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from keras_strategies.strategy.communication import (
    CommunicationOptions as CommunicationOptions,
)
from keras_strategies.strategy.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy

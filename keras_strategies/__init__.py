"""Distribution strategies for Keras 3 on JAX, in the manner of tf.distribute.

    import keras_strategies as ks  # before keras: chooses its JAX backend
    import keras

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=256)

Importing this touches no device and patches nothing.
"""

from keras_strategies.keras_bridge.backend import (
    require_jax_backend as _require_jax_backend,
)

_require_jax_backend()

from keras_strategies import (  # noqa: E402
    cluster_resolver as cluster_resolver,
)
from keras_strategies import data as data  # noqa: E402
from keras_strategies import experimental as experimental  # noqa: E402
from keras_strategies import tpu as tpu  # noqa: E402
from keras_strategies._core.compiled import (  # noqa: E402
    CompiledProgram as CompiledProgram,
)
from keras_strategies._core.reduce_op import (  # noqa: E402
    ReduceOp as ReduceOp,
)
from keras_strategies._core.values import (  # noqa: E402
    DistributedValues as DistributedValues,
)
from keras_strategies._core.values import (  # noqa: E402
    Mirrored as Mirrored,
)
from keras_strategies._core.values import (  # noqa: E402
    PerReplica as PerReplica,
)
from keras_strategies.data.distributed import (  # noqa: E402
    DistributedDataset as DistributedDataset,
)
from keras_strategies.data.distributed import (  # noqa: E402
    DistributedIterator as DistributedIterator,
)
from keras_strategies.data.from_function import (  # noqa: E402
    InputContext as InputContext,
)
from keras_strategies.data.options import (  # noqa: E402
    InputOptions as InputOptions,
)
from keras_strategies.data.options import (  # noqa: E402
    InputReplicationMode as InputReplicationMode,
)
from keras_strategies.keras_bridge.gradients import (  # noqa: E402
    grad as grad,
)
from keras_strategies.keras_bridge.gradients import (  # noqa: E402
    value_and_grad as value_and_grad,
)
from keras_strategies.keras_bridge.layout import (  # noqa: E402
    variable_creator_scope as variable_creator_scope,
)
from keras_strategies.keras_bridge.marks import (  # noqa: E402
    global_batch_loss as global_batch_loss,
)
from keras_strategies.keras_bridge.state import (  # noqa: E402
    merge as merge,
)
from keras_strategies.strategy.current import (  # noqa: E402
    experimental_set_strategy as experimental_set_strategy,
)
from keras_strategies.strategy.current import (  # noqa: E402
    get_replica_context as get_replica_context,
)
from keras_strategies.strategy.current import (  # noqa: E402
    get_strategy as get_strategy,
)
from keras_strategies.strategy.current import (  # noqa: E402
    has_strategy as has_strategy,
)
from keras_strategies.strategy.current import (  # noqa: E402
    in_cross_replica_context as in_cross_replica_context,
)
from keras_strategies.strategy.extended import (  # noqa: E402
    StrategyExtended as StrategyExtended,
)
from keras_strategies.strategy.function import (  # noqa: E402
    function as function,
)
from keras_strategies.strategy.losses import (  # noqa: E402
    compute_average_loss as compute_average_loss,
)
from keras_strategies.strategy.losses import (  # noqa: E402
    scale_regularization_loss as scale_regularization_loss,
)
from keras_strategies.strategy.mirrored import (  # noqa: E402
    MirroredStrategy as MirroredStrategy,
)
from keras_strategies.strategy.multi_worker import (  # noqa: E402
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.strategy.one_device import (  # noqa: E402
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_strategies.strategy.options import (  # noqa: E402
    RunOptions as RunOptions,
)
from keras_strategies.strategy.replica_context import (  # noqa: E402
    ReplicaContext as ReplicaContext,
)
from keras_strategies.strategy.replica_context import (  # noqa: E402
    ValueContext as ValueContext,
)
from keras_strategies.strategy.strategy import (  # noqa: E402
    Strategy as Strategy,
)
from keras_strategies.strategy.tpu import (  # noqa: E402
    TPUStrategy as TPUStrategy,
)

__version__ = "0.1.0.dev0"

"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies import callbacks as callbacks
from keras_strategies import checkpoint as checkpoint
from keras_strategies import cluster_resolver as cluster_resolver
from keras_strategies import data as data
from keras_strategies import estimator as estimator
from keras_strategies import experimental as experimental
from keras_strategies import tpu as tpu
from keras_strategies.data.distributed import (
    DistributedDataset as DistributedDataset,
)
from keras_strategies.data.distributed import (
    DistributedIterator as DistributedIterator,
)
from keras_strategies.data.options import InputOptions as InputOptions
from keras_strategies.data.options import (
    InputReplicationMode as InputReplicationMode,
)
from keras_strategies.data.sources.from_function import (
    InputContext as InputContext,
)
from keras_strategies.gpu.xla_flags import (
    enable_determinism as enable_determinism,
)
from keras_strategies.hooks.global_batch_loss import (
    global_batch_loss as global_batch_loss,
)
from keras_strategies.hooks.gradients import grad as grad
from keras_strategies.hooks.gradients import value_and_grad as value_and_grad
from keras_strategies.hooks.merge import merge as merge
from keras_strategies.kernels.by_rows import by_rows as by_rows
from keras_strategies.planning.report.planned_step import (
    PlannedStep as PlannedStep,
)
from keras_strategies.planning.report.table import Plan as Plan
from keras_strategies.spmd.compiled import CompiledProgram as CompiledProgram
from keras_strategies.spmd.mesh import ReplicaMesh as ReplicaMesh
from keras_strategies.spmd.values import DistributedValues as DistributedValues
from keras_strategies.spmd.values import Mirrored as Mirrored
from keras_strategies.spmd.values import PerReplica as PerReplica
from keras_strategies.spmd.values import ReduceOp as ReduceOp
from keras_strategies.strategy.default import (
    experimental_set_strategy as experimental_set_strategy,
)
from keras_strategies.strategy.default import (
    get_replica_context as get_replica_context,
)
from keras_strategies.strategy.default import get_strategy as get_strategy
from keras_strategies.strategy.default import has_strategy as has_strategy
from keras_strategies.strategy.default import (
    in_cross_replica_context as in_cross_replica_context,
)
from keras_strategies.strategy.extended import (
    StrategyExtended as StrategyExtended,
)
from keras_strategies.strategy.losses import (
    compute_average_loss as compute_average_loss,
)
from keras_strategies.strategy.losses import (
    scale_regularization_loss as scale_regularization_loss,
)
from keras_strategies.strategy.mirrored import (
    MirroredStrategy as MirroredStrategy,
)
from keras_strategies.strategy.mirrored import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_strategies.strategy.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.strategy.replica_context import (
    ReplicaContext as ReplicaContext,
)
from keras_strategies.strategy.replica_context import (
    ValueContext as ValueContext,
)
from keras_strategies.strategy.strategy import Strategy as Strategy
from keras_strategies.strategy.tf_compat.function import function as function
from keras_strategies.strategy.tf_compat.options import RunOptions as RunOptions
from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy
from keras_strategies.tape.gradient_tape import GradientTape as GradientTape
from keras_strategies.variables.abstract_models import abstract as abstract
from keras_strategies.variables.variable_creator import (
    variable_creator_scope as variable_creator_scope,
)

__version__: str

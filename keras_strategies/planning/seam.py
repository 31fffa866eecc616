"""The names of other rooms that plans use.

No other module of this room imports them.
"""

from keras_strategies.cluster.addresses import shorten as shorten
from keras_strategies.cluster.user_code import (
    make_command_line as make_command_line,
)
from keras_strategies.data import distributed as distributed
from keras_strategies.data.source import Source as Source
from keras_strategies.data.sources.from_function import (
    InputContext as InputContext,
)
from keras_strategies.fit.binding import Binding as Binding
from keras_strategies.fit.inputs.choose_source import (
    make_dataset_source as make_dataset_source,
)
from keras_strategies.fit.inputs.feed import make_feed as make_feed
from keras_strategies.fit.inputs.keras_sources import (
    split_validation as split_validation,
)
from keras_strategies.fit.scope_hooks import Call as Call
from keras_strategies.gpu.topology_devices import (
    complete_options as complete_options,
)
from keras_strategies.gpu.topology_devices import is_absent_gpu as is_absent_gpu
from keras_strategies.gpu.topology_devices import is_gpu_name as is_gpu_name
from keras_strategies.keras_bridge import model_flops as model_flops
from keras_strategies.keras_bridge.keras_names import (
    restore_names as restore_names,
)
from keras_strategies.keras_bridge.patches import (
    skip_weights as skip_weights,
)
from keras_strategies.kernels import blocked_head as blocked_head
from keras_strategies.kernels.attention import (
    collect_reasons as collect_reasons,
)
from keras_strategies.kernels.call_signatures import (
    is_rematerialized as is_rematerialized,
)
from keras_strategies.kernels.equal_blocks import find_blocks as find_blocks
from keras_strategies.names import dry_run as dry_run
from keras_strategies.passes import hlo as hlo
from keras_strategies.passes.flops import count_positions as count_positions
from keras_strategies.spmd import compiled as compiled
from keras_strategies.spmd import values as values
from keras_strategies.spmd.batches import num_rows as num_rows
from keras_strategies.spmd.identity import (
    temporary_attribute as temporary_attribute,
)
from keras_strategies.spmd.mesh import ReplicaMesh as ReplicaMesh
from keras_strategies.step.lower_step import get_shape as get_shape
from keras_strategies.step.lower_step import lower_step as lower_step
from keras_strategies.step.step_functions import (
    step_variables as step_variables,
)
from keras_strategies.strategy.compile_only import make_devices as make_devices
from keras_strategies.strategy.default import (
    get_default_context as get_default_context,
)
from keras_strategies.strategy.default import (
    get_default_strategy as get_default_strategy,
)
from keras_strategies.strategy.runner import Runner as Runner
from keras_strategies.strategy.strategy import Strategy as Strategy
from keras_strategies.tpu import chips as chips
from keras_strategies.tpu import replica_meshes as replica_meshes
from keras_strategies.tpu.topology import Topology as Topology
from keras_strategies.variables import partitioners as partitioners
from keras_strategies.variables import shardings as shardings
from keras_strategies.variables.abstract_models import abstract as abstract
from keras_strategies.variables.abstract_variables import (
    ValueStore as ValueStore,
)
from keras_strategies.variables.abstract_variables import describe as describe
from keras_strategies.variables.abstract_variables import (
    storing_values as storing_values,
)
from keras_strategies.variables.model_variables import (
    all_variables as all_variables,
)
from keras_strategies.variables.transformer_layout import (
    transformer_layout as transformer_layout,
)
from keras_strategies.variables.variable_creator import (
    distribution_scope as distribution_scope,
)

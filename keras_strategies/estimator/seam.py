"""The names of other rooms that the Estimator uses.

No other module of this room imports them.
"""

from keras_strategies.callbacks.checkpoint import Checkpoint as Checkpoint
from keras_strategies.callbacks.scalars import Scalars as Scalars
from keras_strategies.checkpoint import DamagedCheckpoint as DamagedCheckpoint
from keras_strategies.checkpoint import Keep as Keep
from keras_strategies.checkpoint import contents as contents
from keras_strategies.checkpoint import reading as reading
from keras_strategies.cluster.addresses import shorten as shorten
from keras_strategies.cluster.checks import check_number as check_number
from keras_strategies.cluster.checks import check_type as check_type
from keras_strategies.cluster.exchange.message_forms import Form as Form
from keras_strategies.cluster.exchange.message_forms import (
    has_form as has_form,
)
from keras_strategies.cluster.exchange.message_forms import is_count as is_count
from keras_strategies.cluster.exchange.message_forms import (
    load_form as load_form,
)
from keras_strategies.cluster.exchange.rounds import Rounds as Rounds
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    VARIABLE as VARIABLE,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    load_tf_config as load_tf_config,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    parse_tf_config as parse_tf_config,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    read_string as read_string,
)
from keras_strategies.cluster.spec import ClusterSpec as ClusterSpec
from keras_strategies.cluster.tasks import count_tasks as count_tasks
from keras_strategies.cluster.untrusted import open_regular as open_regular
from keras_strategies.data import batch_spec as batch_spec
from keras_strategies.data.distributed import (
    DistributedDataset as DistributedDataset,
)
from keras_strategies.data.source import Source as Source
from keras_strategies.data.source import all_rows as all_rows
from keras_strategies.data.sources.from_function import (
    InputContext as InputContext,
)
from keras_strategies.data.sources.iterables import host_batches as host_batches
from keras_strategies.fit.binding import find_binding as find_binding
from keras_strategies.fit.callbacks.resumable_fit import FitState as FitState
from keras_strategies.fit.callbacks.resumable_fit import (
    find_fit_state as find_fit_state,
)
from keras_strategies.fit.scope_hooks import is_built as is_built
from keras_strategies.keras_bridge.keras_names import fresh_names as fresh_names
from keras_strategies.names import dry_run as dry_run
from keras_strategies.spmd.mesh import ReplicaMesh as ReplicaMesh
from keras_strategies.strategy.current import (
    get_entered_strategy as get_entered_strategy,
)
from keras_strategies.strategy.mirrored import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_strategies.strategy.strategy import Strategy as Strategy

"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies.cluster.resolvers.kubernetes_resolver import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from keras_strategies.cluster.resolvers.kubernetes_resolver import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver as ClusterResolver,
)
from keras_strategies.cluster.resolvers.slurm_resolver import (
    SlurmClusterResolver as SlurmClusterResolver,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from keras_strategies.cluster.resolvers.torchrun_resolver import (
    TorchrunClusterResolver as TorchrunClusterResolver,
)
from keras_strategies.cluster.resolvers.union_resolver import (
    SimpleClusterResolver as SimpleClusterResolver,
)
from keras_strategies.cluster.resolvers.union_resolver import (
    UnionClusterResolver as UnionClusterResolver,
)
from keras_strategies.cluster.resolvers.union_resolver import (
    UnionResolver as UnionResolver,
)
from keras_strategies.cluster.spec import ClusterSpec as ClusterSpec
from keras_strategies.cluster.spec import TaskInfo as TaskInfo
from keras_strategies.cluster.tasks import task_info as task_info
from keras_strategies.tpu.cluster_resolver import (
    TPUClusterResolver as TPUClusterResolver,
)

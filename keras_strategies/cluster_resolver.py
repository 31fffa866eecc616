"""Cluster resolvers, under the names of `tf.distribute.cluster_resolver`.

docs/clusters.md says which resolver is for which cluster. A name is imported
when it is first asked for: most programs need none.
"""

from typing import TYPE_CHECKING

from keras_strategies._core.names import tf_names as _tf_names
from keras_strategies._core.names.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from keras_strategies.cluster.resolvers.kubernetes_resolver import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from keras_strategies.cluster.resolvers.kubernetes_resolver import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from keras_strategies.cluster.resolvers.resolver import (
        ClusterResolver as ClusterResolver,
    )
    from keras_strategies.cluster.resolvers.simple_resolver import (
        SimpleClusterResolver as SimpleClusterResolver,
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

_MODULES = {
    "ClusterResolver": "cluster.resolvers.resolver",
    "ClusterSpec": "cluster.spec",
    "KubernetesClusterResolver": "cluster.resolvers.kubernetes_resolver",
    "KubernetesExecutableLocation": "cluster.resolvers.kubernetes_resolver",
    "SimpleClusterResolver": "cluster.resolvers.simple_resolver",
    "SlurmClusterResolver": "cluster.resolvers.slurm_resolver",
    "TFConfigClusterResolver": "cluster.resolvers.tf_config_resolver",
    "TPUClusterResolver": "tpu.cluster_resolver",
    "TaskInfo": "cluster.spec",
    "TorchrunClusterResolver": "cluster.resolvers.torchrun_resolver",
    "UnionClusterResolver": "cluster.resolvers.union_resolver",
    "UnionResolver": "cluster.resolvers.union_resolver",
    "task_info": "cluster.tasks",
}

__getattr__, __dir__ = _lazy_names(
    __name__, "keras_strategies", _MODULES, _tf_names.CLUSTER_RESOLVER
)

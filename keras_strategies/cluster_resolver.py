"""Cluster resolvers, under the names of `tf.distribute.cluster_resolver`.

docs/clusters.md lists the resolver for each kind of cluster. Each name is
imported only when it is first used, because most programs use no resolver.
"""

from keras_strategies.names.lazy_names import CLUSTER_RESOLVER as _INSTEAD
from keras_strategies.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "ClusterResolver": "cluster.resolvers.resolver",
    "ClusterSpec": "cluster.spec",
    "KubernetesClusterResolver": "cluster.resolvers.kubernetes_resolver",
    "KubernetesExecutableLocation": "cluster.resolvers.kubernetes_resolver",
    "SimpleClusterResolver": "cluster.resolvers.union_resolver",
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
    __name__, "keras_strategies", _MODULES, _INSTEAD
)

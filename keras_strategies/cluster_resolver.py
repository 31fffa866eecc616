"""Who is in the cluster; the names of `tf.distribute.cluster_resolver`.

docs/clusters.md says which resolver is for which cluster. A name is imported
when it is first asked for: most programs need none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategies.cluster.kubernetes_resolver import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from keras_strategies.cluster.kubernetes_resolver import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from keras_strategies.cluster.resolver import (
        ClusterResolver as ClusterResolver,
    )
    from keras_strategies.cluster.simple_resolver import (
        SimpleClusterResolver as SimpleClusterResolver,
    )
    from keras_strategies.cluster.slurm_resolver import (
        SlurmClusterResolver as SlurmClusterResolver,
    )
    from keras_strategies.cluster.spec import ClusterSpec as ClusterSpec
    from keras_strategies.cluster.spec import TaskInfo as TaskInfo
    from keras_strategies.cluster.tasks import task_info as task_info
    from keras_strategies.cluster.tf_config_resolver import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from keras_strategies.cluster.torchrun_resolver import (
        TorchrunClusterResolver as TorchrunClusterResolver,
    )
    from keras_strategies.cluster.union_resolver import (
        UnionClusterResolver as UnionClusterResolver,
    )
    from keras_strategies.cluster.union_resolver import (
        UnionResolver as UnionResolver,
    )
    from keras_strategies.tpu.cluster_resolver import (
        TPUClusterResolver as TPUClusterResolver,
    )

_PACKAGE = "keras_strategies.cluster"
_MODULES = {
    "ClusterResolver": "resolver",
    "ClusterSpec": "spec",
    "KubernetesClusterResolver": "kubernetes_resolver",
    "KubernetesExecutableLocation": "kubernetes_resolver",
    "SimpleClusterResolver": "simple_resolver",
    "SlurmClusterResolver": "slurm_resolver",
    "TFConfigClusterResolver": "tf_config_resolver",
    "TPUClusterResolver": "tpu.cluster_resolver",
    "TaskInfo": "spec",
    "TorchrunClusterResolver": "torchrun_resolver",
    "UnionClusterResolver": "union_resolver",
    "UnionResolver": "union_resolver",
    "task_info": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    package = "keras_strategies" if "." in module else _PACKAGE
    module = f"{package}.{module}"
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

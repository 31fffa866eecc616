"""GPUs as JAX describes them, without a GPU."""

import dataclasses
from typing import Any

from keras_strategies.gpu.topology_devices import TARGETS


@dataclasses.dataclass(frozen=True)
class Client:
    """What JAX says of a client that can only compile."""

    runtime_type: str = "compile_only_runtime"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What JAX says of one GPU that is not there."""

    id: int
    process_index: int = 0
    device_kind: str = TARGETS["h100"].device_kind
    platform: str = "gpu"
    client: Any = Client()


def make_hosts(hosts, gpus, name="h100"):
    """The GPUs of some hosts, in JAX's order."""
    kind = TARGETS[name].device_kind
    return [Gpu(k, k // gpus, kind) for k in range(hosts * gpus)]

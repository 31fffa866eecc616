"""The order of the GPUs of several hosts, which have no place in a slice."""

import dataclasses

import pytest

import keras_strategies as ks
from keras_strategies.gpu.topology_devices import make_gpu_devices
from keras_strategies.tpu.device_groups import default_device_order
from keras_strategies.tpu.topology import Topology
from tests.support.slices import group_devices


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What JAX says of a GPU: its host, process and number, as `coords`."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def make_hosts(hosts, processes, gpus, *, has_one_domain=False):
    """GPUs as XLA describes them: a slice is a domain of NVLink."""
    return tuple(
        Gpu(
            id=(host * processes + process) * gpus + gpu,
            process_index=host * processes + process,
            slice_index=0 if has_one_domain else host,
            coords=(0, host, gpu) if has_one_domain else (host, process, gpu),
        )
        for host in range(hosts)
        for process in range(processes)
        for gpu in range(gpus)
    )


MACHINES = {
    "8 GPUs": make_hosts(1, 1, 8),
    "8 processes of a host": make_hosts(1, 8, 1),
    "2 hosts": make_hosts(2, 1, 8),
    "2 hosts in one domain": make_hosts(2, 1, 8, has_one_domain=True),
    "2 hosts, a process for each GPU": make_hosts(2, 8, 1),
    "2 hosts, a process for 2 GPUs": make_hosts(2, 4, 2),
}


def check_order(devices):
    assert default_device_order(devices) == tuple(devices)
    for shards in (None, 4, 8):
        assert group_devices(devices, shards) == (tuple(devices), shards)
    topology = Topology.from_devices(devices)
    process_devices = {
        task: [d for d in devices if d.process_index == task]
        for task in range(topology.num_tasks)
    }
    assert topology.mesh_shape.tolist() == [len(devices), 1, 1, 1]
    for task, owned in process_devices.items():
        for ordinal, device in enumerate(owned):
            place = topology.device_coordinates[task, ordinal]
            assert place.tolist() == [devices.index(device), 0, 0, 0]


@pytest.mark.parametrize("name", MACHINES)
def test_gpus_keep_the_order_of_jax(name):
    check_order(MACHINES[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "hosts", "gpus"),
    [("h100:8", 1, 8), ("h100:2x4", 2, 4), ("h100:8x8", 8, 8)],
)
def test_absent_gpus_are_ordered_by_host(name, hosts, gpus):
    devices = make_gpu_devices(name)
    check_order(devices)
    assert [d.process_index for d in devices] == [
        host for host in range(hosts) for _ in range(gpus)
    ]


@pytest.mark.gpu
def test_the_gpus_of_a_host_share_variables_by_default():
    strategy = ks.MirroredStrategy.for_topology(
        "h100:8x8", variable_partitioner=ks.experimental.FullySharded()
    )
    mesh = strategy.mesh
    assert (mesh.num_replicas, mesh.num_processes, mesh.shards) == (64, 8, 8)
    assert [d.process_index for d in mesh.devices[:9]] == [0] * 8 + [1]


@pytest.mark.gpu
def test_replicas_of_two_gpus_stay_on_a_host():
    strategy = ks.MirroredStrategy.for_topology(
        "h100:8x8", computation_shape=[2, 1, 1, 1]
    )
    mesh = strategy.mesh
    assert (mesh.num_replicas, mesh.cores_per_replica) == (32, 2)
    hosts = [d.process_index for d in mesh.devices]
    assert hosts[::2] == hosts[1::2] == sorted(hosts[::2])

"""Topologies by name, from libtpu: `./run test -m tpu`."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies.tpu import device_groups
from keras_strategies.tpu.device_assignment import replica_mesh_devices
from keras_strategies.tpu.device_groups import make_tpu_devices
from keras_strategies.tpu.experimental import DeviceAssignment, Topology
from tests.support.slices import group_devices, make_slice

pytestmark = pytest.mark.tpu

# name, mesh_shape, tasks
SLICES = [
    ("v5e:2x2", (2, 2, 1, 1), 1),
    ("v5e:4x4", (4, 4, 1, 1), 4),
    ("v5e:16x16", (16, 16, 1, 1), 64),
    ("v5p:8x8x16", (8, 8, 16, 1), 256),
    ("v6e:4x4", (4, 4, 1, 1), 4),
    ("tpu7x:2x2x1", (2, 2, 1, 2), 1),
]


@pytest.mark.parametrize(("name", "mesh_shape", "tasks"), SLICES)
def test_a_name_gives_a_whole_slice(name, mesh_shape, tasks):
    topology = Topology.from_name(name)
    assert topology.mesh_shape.tolist() == list(mesh_shape)
    assert topology.num_tasks == tasks
    assert topology.num_tpus_per_task == math.prod(mesh_shape) // tasks
    assert topology.missing_devices.size == 0
    for place in topology.device_coordinates.reshape(-1, 4).tolist():
        device = topology.device_at_coordinates(place)
        assert [*device.coords, device.core_on_chip] == place
        assert device.process_index == topology.task_ordinal_at_coordinates(
            place
        )


@pytest.mark.parametrize(("name", "mesh_shape", "tasks"), SLICES)
def test_the_tests_own_slices_are_as_real_ones(name, mesh_shape, tasks):
    def facts(devices):
        return [
            (d.id, d.process_index, tuple(d.coords), d.core_on_chip)
            for d in devices
        ]

    made = make_slice(mesh_shape[:3], num_cores=mesh_shape[3])
    assert facts(made) == facts(make_tpu_devices(name))


@pytest.mark.parametrize(("name", "mesh_shape", "tasks"), SLICES)
def test_default_order_keeps_processes_together(name, mesh_shape, tasks):
    devices = make_tpu_devices(name)
    ordered = device_groups.default_device_order(devices)
    assert sorted(ordered, key=devices.index) == list(devices)
    assert num_runs(ordered) == tasks


def num_runs(devices):
    owners = [device.process_index for device in devices]
    return len(list(itertools.groupby(owners)))


@pytest.mark.parametrize("name", ["v5e:4x4", "v5e:16x16"])
def test_an_all_reduce_over_a_whole_slice_is_the_same_in_any_order(name):
    def compile_for(devices):
        mesh = Mesh(np.array(devices), ("replica",))
        whole = NamedSharding(mesh, PartitionSpec())
        split = NamedSharding(mesh, PartitionSpec("replica"))
        rows = jax.ShapeDtypeStruct(
            (8 * len(devices), 128), jnp.float32, sharding=split
        )
        mean = jax.jit(lambda x: x.mean(axis=0), out_shardings=whole)
        return mean.lower(rows).compile().as_text()

    devices = list(make_tpu_devices(name))
    shuffled = np.random.default_rng(0).permutation(np.array(devices))
    orders = (device_groups.default_device_order(devices), shuffled.tolist())
    texts = {compile_for(order) for order in orders}
    assert len(texts) == 1
    assert "all-reduce" in texts.pop()


@pytest.mark.parametrize(
    ("name", "shards"), [("v5e:16x16", 64), ("v5p:8x8x8", 64), ("v5e:4x4", 16)]
)
def test_collectives_of_groups_are_the_same_in_any_order(name, shards):
    def compile_for(groups):
        mesh = Mesh(np.array(groups), ("group", "shard"))

        def step(weight, x):
            y = x @ jax.lax.all_gather(weight, "shard", tiled=True)
            grad = jax.lax.psum_scatter(x.T @ y, "shard", tiled=True)
            return jax.lax.psum(grad, "group")

        split = PartitionSpec("shard")
        rows = PartitionSpec(("group", "shard"))
        shapes = ((1024, 1024), split), ((8 * mesh.size, 1024), rows)
        arguments = [
            jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, spec)
            )
            for shape, spec in shapes
        ]
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(split, rows),
            out_specs=split,
            check_vma=False,
        )
        return jax.jit(mapped).lower(*arguments).compile().as_text()

    ordered, _ = group_devices(make_tpu_devices(name), shards)
    groups = np.array(ordered).reshape(-1, shards)
    shuffled = np.random.default_rng(0).permutation(shards)
    texts = {compile_for(order) for order in (groups, groups[:, shuffled])}
    assert len(texts) == 1
    assert "all-gather" in texts.pop()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1)])
def test_a_program_compiles_for_replicas_of_several_cores(shape):
    num_cores = math.prod(shape)
    built = DeviceAssignment.build(
        Topology.from_name("v5e:4x4"), shape, num_replicas=16 // num_cores
    )
    mesh = Mesh(replica_mesh_devices(built), ("replica", "model"))

    def sharded(shape, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    @jax.jit
    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    compiled = gradient.lower(
        sharded((128, 256), None, "model"), sharded((64, 128), "replica", None)
    ).compile()
    assert "all-reduce" in compiled.as_text()


def test_slices_are_joined_slice_after_slice():
    devices = make_tpu_devices("v5e:4x4", num_slices=2)
    assert len(devices) == 32
    ordered = device_groups.default_device_order(devices)
    slices = [device.slice_index for device in ordered]
    assert slices == [0] * 16 + [1] * 16
    assert num_runs(ordered) == 8
    with pytest.raises(ValueError, match="one slice"):
        Topology.from_devices(devices)


@pytest.mark.parametrize("name", ["v99:2x2", "v5e:3x3", "v5p:3x3x3"])
def test_a_slice_that_libtpu_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match="'v5e:4x4'") as caught:
        Topology.from_name(name)
    assert name in str(caught.value)

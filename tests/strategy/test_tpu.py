"""TPUStrategy as it is made, on CPUs and fake TPUs."""

import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from rich.console import Console

import keras_strategies as ks
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.inspect import describe
from keras_strategies.tpu.replica_meshes import make_assigned_mesh
from tests.support.slices import make_slice
from tests.support.strategies import cores_strategy

DeviceAssignment = ks.tpu.experimental.DeviceAssignment
Topology = ks.tpu.experimental.Topology
Resolver = ks.cluster_resolver.TPUClusterResolver


def make_assignment(cores, replicas, devices=None):
    topology = Topology.from_devices(devices or jax.devices())
    return DeviceAssignment.build(
        topology, [cores, 1, 1, 1], num_replicas=replicas
    )


def make_model():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, name="dense")]
    )
    model.compile("adam", "mse")
    return model


def test_it_takes_all_devices():
    strategy = ks.TPUStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.cluster_resolver is None


def test_it_takes_a_resolvers_devices():
    resolver = Resolver("local")
    strategy = ks.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.cluster_resolver is resolver


@pytest.mark.parametrize(
    "make",
    [
        lambda a: ks.TPUStrategy(None, a),
        lambda a: ks.TPUStrategy(experimental_device_assignment=a),
        lambda a: ks.experimental.TPUStrategy(device_assignment=a),
        lambda a: ks.TPUStrategy(
            device_assignment=[a], experimental_spmd_xla_partitioning=True
        ),
    ],
)
def test_an_assignment_makes_replicas_of_its_cores(make):
    strategy = make(make_assignment(2, 3))
    assert strategy.num_replicas_in_sync == 3
    assert strategy.extended.worker_devices == tuple(jax.devices()[:6:2])
    assert strategy.extended.parameter_devices == tuple(jax.devices()[:6])
    assert repr(strategy).startswith("<TPUStrategy of 3 replicas of 2 cores")


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"device_assignment": 3}, TypeError, ["DeviceAssignment.build", "3"]),
        ({"device_assignment": []}, ValueError, ["at least one", "[]"]),
        (
            {
                "device_assignment": [
                    make_assignment(2, 2),
                    make_assignment(4, 1),
                ]
            },
            ValueError,
            ["[2, 4]", "`computation_shape`"],
        ),
        (
            {
                "device_assignment": make_assignment(2, 2),
                "experimental_device_assignment": make_assignment(2, 2),
            },
            ValueError,
            ["together", "Pass only"],
        ),
        (
            {
                "device_assignment": [
                    make_assignment(2, 2),
                    make_assignment(2, 1),
                ]
            },
            ValueError,
            ["must not contain duplicates"],
        ),
        (
            {
                "device_assignment": DeviceAssignment(
                    Topology(
                        mesh_shape=[2, 1, 1, 1],
                        device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]],
                    ),
                    [[[0, 0, 0, 0]]],
                )
            },
            ValueError,
            ["from_devices"],
        ),
        ({"tpu_cluster_resolver": "local"}, TypeError, ["str", "resolver"]),
        ({"layout_map": ["kernel"]}, TypeError, ["list"]),
        ({"layout_map": {"a": (None, "batch")}}, ValueError, ["'batch'"]),
        (
            {"layout_map": {"a": ("model", "model")}},
            ValueError,
            ["at most one"],
        ),
        ({"layout_map": {"a": None}}, ValueError, ["'a'", "None", "tuple"]),
        ({"layout_map": {"(": ("model",)}}, ValueError, ["'('", "regular"]),
        ({"layout_map": {"kernel": 5}}, ValueError, ["layout_map['kernel']"]),
        (
            {
                "device_assignment": make_assignment(2, 3),
                "layout_map": {"a": ("model",)},
                "context_parallel": True,
            },
            ValueError,
            ["`context_parallel`", "1 entries", "Omit one"],
        ),
        ({"context_parallel": 4}, ValueError, ["bool", "4", "assignment"]),
        ({"context_parallel": True}, ValueError, ["ica=1", "assignment"]),
    ],
)
def test_wrong_arguments_are_named(arguments, kind, parts):
    with pytest.raises(kind) as caught:
        ks.TPUStrategy(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ((None, "model", None), ["dense/kernel", "(6, 4)"]),
        (("model",), ["dense/kernel", "(6, 4)"]),
        (("model", None), ["dense/kernel", "4 cores"]),
    ],
)
def test_a_layout_that_a_variable_cannot_have_is_refused(layout, parts):
    strategy = cores_strategy(2, 4, {".*kernel": layout})
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="layout_map") as caught,
    ):
        make_model()
    for part in parts:
        assert part in str(caught.value)


def test_two_entries_for_a_variable_are_refused():
    layout_map = {".*kernel": (None, "model"), ".*/kernel": ("model", None)}
    strategy = cores_strategy(2, 4, layout_map)
    with (
        strategy.scope(),
        pytest.raises(
            ValueError, match="only one entry of `layout_map`"
        ) as caught,
    ):
        make_model()
    assert "dense/kernel" in str(caught.value)


def test_a_layout_may_be_a_function_of_the_shape():
    def wide(shape):
        return (None, "model") if shape[1] > 3 else (None, None)

    strategy = cores_strategy(4, 2, {".*kernel": wide})
    with strategy.scope():
        model = make_model()
        whole = keras.layers.Dense(2)
        whole.build((None, 6))
    kernel = model.layers[0].kernel.value
    assert kernel.addressable_shards[0].data.shape == (6, 2)
    assert whole.kernel.value.sharding.is_fully_replicated
    for answer in ((None, "batch"), "model", None):
        wrong = cores_strategy(
            4, 2, {".*kernel": lambda shape, answer=answer: answer}
        )
        shown = re.escape(f"layout_map['.*kernel'] = {answer!r}")
        with wrong.scope(), pytest.raises(ValueError, match=shown):
            make_model()


def test_a_layout_map_of_keras_is_taken():
    device_mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"])
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*kernel"] = (None, "model")
    strategy = cores_strategy(4, 2, layout_map)
    with strategy.scope():
        model = make_model()
    kernel = model.layers[0].kernel.value
    assert kernel.addressable_shards[0].data.shape == (6, 2)


def test_a_model_made_before_is_divided_with_its_slots():
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    strategy = cores_strategy(4, 2, {".*dense/kernel": (None, "model")})
    strategy.attach(model)
    shapes = [
        v.value.addressable_shards[0].data.shape
        for v in (*model.trainable_variables, *model.optimizer.variables)
    ]
    # Kernel, bias; iterations, learning rate, two slots of each.
    assert sorted(shapes) == sorted(
        [(6, 2), (4,), (), (), (6, 2), (6, 2), (4,), (4,)]
    )
    strategy.detach(model)
    assert model.predict(np.ones((2, 6)), verbose=0).shape == (2, 4)


def test_local_results_of_a_divided_variable_are_whole():
    strategy = cores_strategy(4, 2, {".*dense/kernel": (None, "model")})
    with strategy.scope():
        model = make_model()
    kernel = model.layers[0].kernel
    results = strategy.experimental_local_results(kernel)
    assert len(results) == 4
    for i, result in enumerate(results):
        assert result.devices() == {jax.devices()[2 * i]}
        np.testing.assert_array_equal(result, kernel.numpy())
    bias = strategy.experimental_local_results(model.layers[0].bias)
    assert [len(b.sharding.device_set) for b in bias] == [1] * 4


def test_copies_of_a_part_that_differ_are_found():
    strategy = cores_strategy(2, 2, {".*dense/kernel": (None, "model")})
    with strategy.scope():
        model = make_model()
    kernel = model.layers[0].kernel
    parts = [np.asarray(s.data).copy() for s in kernel.value.addressable_shards]
    parts[3] += 1
    kernel._value = jax.make_array_from_single_device_arrays(
        kernel.shape,
        kernel.value.sharding,
        [
            jax.device_put(part, shard.device)
            for part, shard in zip(
                parts, kernel.value.addressable_shards, strict=True
            )
        ],
    )
    with pytest.raises(AssertionError, match="dense/kernel"):
        ks_testing().assert_replicated(model)


def ks_testing():
    from keras_strategies import testing

    return testing


def shorten(renderable):
    out = io.StringIO()
    Console(file=out, width=100).print(renderable)
    return out.getvalue()


def test_the_devices_of_replicas_of_two_cores():
    devices = make_slice((4, 2, 1), host=(2, 2, 1))
    mesh = ReplicaMesh(devices=devices, cores_per_replica=2)
    text = shorten(describe.list_processes(mesh))
    assert "4 replicas on axis 'replica', each of 2 cores on axis" in text
    assert text.count("process") == 3  # The heading's, and two.
    lines = text.splitlines()[1:]
    assert ["replicas 0 to 1" in line for line in lines] == [True, False]
    assert [line.count("tpu:") for line in lines] == [4, 4]


def test_describe_and_explain_input_know_the_cores(capsys):
    strategy = cores_strategy(4, 2, {".*dense/kernel": (None, "model")})
    with strategy.scope():
        model = make_model()
    strategy.describe(model)
    text = capsys.readouterr().out
    assert "P(None, 'model')" in text or "Spec(None, 'model')" in text
    assert "each of 2 cores" in text
    rows = str(strategy.explain_input((np.ones((8, 2)),), batch_size=8))
    assert "2, 2, 2, 2" in rows


# Several hosts.


def test_replicas_of_a_process_follow_each_other():
    devices = make_slice((4, 4, 1))
    topology = Topology.from_devices(devices)
    built = DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=8)
    mesh = make_assigned_mesh(built)
    assert mesh.num_replicas == 8
    assert mesh.num_processes == 4
    owners = [device.process_index for device in mesh.first_devices]
    assert owners == [o for p in mesh.processes for o in (p, p)]
    pairs = zip(mesh.devices[::2], mesh.devices[1::2], strict=True)
    for first, second in pairs:
        assert first.coords[1:] == second.coords[1:]


@pytest.mark.parametrize(
    ("shape", "readers"),
    [
        ([4, 1, 1, 1], [{0, 1}, {2, 3}]),
        ([1, 4, 1, 1], [{0, 2}, {1, 3}]),
        ([4, 4, 1, 1], [{0, 1, 2, 3}]),
    ],
)
def test_replicas_of_whole_processes(shape, readers):
    topology = Topology.from_devices(make_slice((4, 4, 1)))
    count = 16 // int(np.prod(shape))
    built = DeviceAssignment.build(topology, shape, num_replicas=count)
    mesh = make_assigned_mesh(built)
    assert [set(group) for group in mesh.readers] == readers
    assert mesh.replicas_per_process == count // len(readers)
    assert mesh.spans_processes
    first = mesh.first_of_readers([f"of {p}" for p in mesh.processes])
    assert first == [f"of {group[0]}" for group in mesh.readers]


def test_replicas_that_share_processes_in_part_are_refused():
    topology = Topology.from_devices(make_slice((4, 4, 1)))
    # Replicas of the processes 0, 0 and 1, 1, ...
    cores = [[[x, 0, 0, 0], [x, 1, 0, 0]] for x in (0, 3)]
    cores += [[[1, y, 0, 0], [2, y, 0, 0]] for y in (0, 1)]
    built = DeviceAssignment(topology, cores)
    with pytest.raises(
        ValueError, match="share all of their replicas"
    ) as error:
        make_assigned_mesh(built)
    assert "[0, 1, [0, 1], [0, 1]]" in str(error.value)


@pytest.mark.parametrize("cores", [[2, 1, 1, 1], [1, 2, 1, 1], [2, 2, 1, 1]])
def test_replicas_that_divide_variables_are_boxes_of_whole_hosts(cores):
    num_cores = int(np.prod(cores))
    topology = Topology.from_devices(make_slice((4, 8, 1)))
    built = DeviceAssignment.build(
        topology, cores, num_replicas=32 // num_cores
    )
    kind = ks.experimental.FullySharded
    mesh = make_assigned_mesh(built, kind(8 // num_cores))
    devices = np.array(mesh.devices, dtype=object)
    for group in devices.reshape(4, 8):
        places = np.array([device.coords for device in group])
        assert sorted(np.ptp(places, axis=0) + 1) == [1, 2, 4]
        assert len({device.process_index for device in group}) == 2
    replicas = {frozenset(cores) for cores in devices.reshape(-1, num_cores)}
    given = make_assigned_mesh(built).devices
    assert replicas == {
        frozenset(given[i : i + num_cores]) for i in range(0, 32, num_cores)
    }
    # Left out, a group is a slice of at most 64 chips.
    assert make_assigned_mesh(built, kind()).shards == 32 // num_cores
    with pytest.raises(ValueError, match="complete hosts") as caught:
        make_assigned_mesh(built, kind(3))
    assert f"in slices with {32 // num_cores} replicas" in str(caught.value)


def test_an_assignment_of_each_slice():
    slices = [
        make_slice((4, 4, 1), slice_index=i, first_process=4 * i)
        for i in range(2)
    ]
    built = [
        DeviceAssignment.build(
            Topology.from_devices(s), [2, 2, 1, 1], num_replicas=4
        )
        for s in slices
    ]
    mesh = make_assigned_mesh(built)
    assert [d.slice_index for d in mesh.first_devices] == [0] * 4 + [1] * 4
    assert mesh.num_processes == 8


# Compiling for what is not there; here devices that are.


@pytest.fixture(name="abstract")
def make_abstract():
    mesh = ReplicaMesh(devices=tuple(jax.devices()[:4]), is_abstract=True)
    return ks.Strategy(mesh)


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda s, m: m.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0),
        lambda s, m: m.evaluate(np.ones((8, 6)), np.ones((8, 4)), verbose=0),
        lambda s, m: m.predict(np.ones((8, 6)), verbose=0),
        lambda s, m: m.train_on_batch(np.ones((8, 6)), np.ones((8, 4))),
        lambda s, m: m.predict_on_batch(np.ones((8, 6))),
        lambda s, m: s.run(lambda: 1.0),
        lambda s, m: s.reduce("sum", 0, axis=None),
        lambda s, m: s.gather(np.ones(2), axis=0),
        lambda s, m: s.experimental_local_results(3),
        lambda s, m: s.experimental_distribute_dataset([np.ones((4, 6))]),
        lambda s, m: s.distribute_datasets_from_function(lambda c: []),
        lambda s, m: s.experimental_distribute_values_from_function(
            lambda c: 1
        ),
        lambda s, m: s.extended.broadcast_to(1.0),
        lambda s, m: s.extended.reduce_to("sum", 1.0, None),
        lambda s, m: s.extended.update(m.layers[0].bias, lambda v: None),
    ],
)
def test_what_would_run_says_that_it_cannot(abstract, call):
    with abstract.scope():
        model = make_model()
    with pytest.raises(RuntimeError, match="compile_step") as caught:
        call(abstract, model)
    assert "can only compile" in str(caught.value)


def test_variables_stay_on_the_host_and_are_described_as_planned(
    abstract, capsys
):
    with abstract.scope():
        model = make_model()
    for variable in model.variables:
        assert len(variable.value.sharding.device_set) == 1
    abstract.describe(model)
    assert "replicated" in capsys.readouterr().out
    assert "to compile for" in repr(abstract)
    assert "2, 2, 2, 2" in str(abstract.explain_input((np.ones((8, 2)),), 8))


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_step_is_compiled(abstract, kind):
    with abstract.scope():
        model = make_model()
    batch = (spec(16, 6), spec(16, 4))
    program = abstract.compile_step(model, batch, kind=kind)
    assert program.collectives["all-gather"] == 0
    assert (program.collectives["all-reduce"] > 0) == (kind != "predict")
    # A replica's four rows, and kernel and bias.
    rows = 4 * 4 * (6 + (kind != "predict") * 4)
    assert program.argument_bytes >= rows + 4 * (6 * 4 + 4)
    assert program.bytes_per_chip >= program.argument_bytes
    assert "HloModule" in program.as_text()
    lines = str(program).splitlines()
    assert lines[0] == f"{kind} step: 4 replicas"
    assert lines[2].startswith("MB per chip: 0.00")


def test_what_is_compiled_is_what_runs():
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        model = make_model()
    x, y = np.ones((8, 6), "float32"), np.ones((8, 4), "float32")
    program = strategy.compile_step(model, (x, y))
    assert program.collectives["all-reduce"] >= 1
    before = model.layers[0].kernel.numpy()
    model.fit(x, y, batch_size=8, verbose=0)
    assert np.any(before != model.layers[0].kernel.numpy())


def test_a_model_that_was_never_called_is_built(abstract):
    with abstract.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    abstract.compile_step(model, spec(8, 5), kind="predict")
    assert model.layers[0].kernel.shape == (5, 3)


class OwnStep(keras.Model):
    """Takes its batch apart by itself, and learns of x alone as well."""

    def train_step(self, state, data):
        is_pair = isinstance(data, tuple)
        x, y = data if is_pair else (data, 0.0)
        trainable, other, *rest = state
        pred, _ = self.stateless_call(trainable, other, x)
        loss = keras.ops.mean((pred - y) ** 2)
        return {"loss": loss}, (trainable, other, *rest)


def test_an_own_step_is_given_the_batch_as_a_dataset_yields_it(abstract):
    with abstract.scope():
        inputs = keras.Input((6,))
        model = OwnStep(inputs, keras.layers.Dense(4)(inputs))
        model.compile("sgd", "mse")
    for batch in ((spec(8, 6), spec(8, 4)), spec(8, 6)):
        assert abstract.compile_step(model, batch).num_replicas > 1


def test_a_batch_that_cannot_be_shared_evenly_is_compiled(abstract):
    with abstract.scope():
        model = make_model()
    for kind in ("train", "predict"):
        abstract.compile_step(model, (spec(7, 6), spec(7, 4)), kind=kind)


def test_a_function_is_compiled(abstract):
    with abstract.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(0.1)

    def step(batch, scale, whole, name):
        x, y = batch
        assert x.shape == (4, 6)
        assert whole.shape == (3,)
        assert name == "a"
        loss, grads = ks.value_and_grad(
            lambda: keras.ops.mean((model(x) - y) ** 2) * scale,
            model.trainable_variables,
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    program = abstract.compile_run(
        step,
        ((spec(16, 6), spec(16, 4)), np.float32(2)),
        {"whole": ks.Mirrored(spec(3)), "name": "a"},
    )
    assert program.collectives["all-reduce"] >= 1
    assert program.name == "run of step"
    assert optimizer.built


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (lambda s, m: s.compile_step(3, spec(4, 6)), TypeError, ["int"]),
        (
            lambda s, m: s.compile_step(m, (spec(4, 6), spec(8, 4))),
            ValueError,
            ["'[0]': 4", "'[1]': 8"],
        ),
        (
            lambda s, m: s.compile_step(m, (spec(0, 6), spec(0, 4))),
            ValueError,
            ["at least one row"],
        ),
        (
            lambda s, m: s.compile_step(m, "x", kind="predict"),
            TypeError,
            ["'x'", "ShapeDtypeStruct"],
        ),
        (
            lambda s, m: s.compile_step(m, (spec(4, 6),), kind="fit"),
            ValueError,
            ["'fit'", "'train'"],
        ),
        (
            lambda s, m: s.compile_step(keras.Sequential(), spec(4, 6)),
            ValueError,
            ["`strategy.attach(model)`"],
        ),
        (
            lambda s, m: s.compile_run(lambda x: x, (spec(6),)),
            ValueError,
            ["6 rows", "4 replicas", "Mirrored"],
        ),
        (lambda s, m: s.compile_run(3), TypeError, ["int"]),
    ],
)
def test_what_cannot_be_compiled_is_named(abstract, call, kind, parts):
    with abstract.scope():
        model = make_model()
    with pytest.raises(kind) as caught:
        call(abstract, model)
    for part in parts:
        assert part in str(caught.value)


def test_devices_of_a_process_apart_are_refused():
    devices = [dataclasses.replace(d) for d in make_slice((4, 2, 1))]
    mixed = (*devices[:2], *devices[4:], *devices[2:4])
    with pytest.raises(ValueError, match="replicas of a process must be"):
        ReplicaMesh(devices=mixed)
    turned = (*devices[4:], *devices[:4])
    assert ReplicaMesh(devices=turned).processes == (1, 0)
    with pytest.raises(ValueError, match="cores_per_replica=3"):
        ReplicaMesh(devices=tuple(devices), cores_per_replica=3)


def test_one_replica_of_several_cores_reduces():
    topology = Topology.from_devices(jax.devices()[:2])
    built = DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=1)
    strategy = ks.TPUStrategy(device_assignment=built)

    def reduced(x):
        context = ks.get_replica_context()
        return context.all_reduce("sum", x), context.all_gather(x, 0)

    total, rows = strategy.run(reduced, (np.arange(3.0, dtype="float32"),))
    np.testing.assert_array_equal(total, [0, 1, 2])
    np.testing.assert_array_equal(rows, [0, 1, 2])


def test_compiler_options_are_passed_on():
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    options = {"xla_cpu_enable_fast_math": False}
    program = strategy.compile_run(
        lambda: jnp.ones(2), compiler_options=options
    )
    assert program.num_replicas == 2

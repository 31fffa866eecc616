"""What `describe` draws and lists, and in how many lines."""

import dataclasses
import io
import re

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import keras_strategies as ks
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.inspect import describe


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def fake_devices(count, per_process):
    return [FakeDevice(i, i // per_process) for i in range(count)]


def make_mesh(devices=None):
    return ReplicaMesh(devices=devices or jax.devices())


def show(renderable, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def placed(value, sharding):
    variable = keras.Variable(np.asarray(value), name="placed")
    variable._value = jax.device_put(variable.value, sharding)
    return variable


def find_row(variable):
    return describe.describe_variable(variable, make_mesh())


def test_devices_of_one_process_are_in_a_line():
    lines = show(describe.list_processes(make_mesh()))
    assert lines[0].rstrip() == "Mesh: 8 replicas on axis 'replica', cpu"
    assert len(lines) == 2
    assert "replicas 0 to 7" in lines[1]
    assert all(f"cpu:{i}" in lines[1] for i in range(8))


def test_the_first_eight_devices_of_a_process_are_listed():
    devices = fake_devices(256, per_process=256)
    text = "\n".join(show(describe.list_processes(make_mesh(devices))))
    assert text.startswith("Mesh: 256 replicas")
    assert "replicas 0 to 255" in text
    assert "tpu:7, ..." in text


def test_the_first_four_of_64_processes_are_listed():
    devices = fake_devices(256, per_process=4)
    lines = show(describe.list_processes(make_mesh(devices)))
    assert lines[0].rstrip().endswith("64 processes")
    assert [line.split()[:6] for line in lines[1:]] == [
        ["process", "0", "replicas", "0", "to", "3"],
        ["process", "1", "replicas", "4", "to", "7"],
        ["process", "2", "replicas", "8", "to", "11"],
        ["process", "3", "replicas", "12", "to", "15"],
        ["..."],
    ]


def test_few_devices_of_two_processes_are_all_listed():
    devices = fake_devices(8, per_process=4)
    lines = show(describe.list_processes(make_mesh(devices)))
    assert len(lines) == 1 + 2
    assert all(f"tpu:{i}" in "\n".join(lines) for i in range(8))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 3, 4, 5)])
def test_any_rank_is_listed_with_its_bytes(shape):
    whole = NamedSharding(Mesh(jax.devices(), ("replica",)), PartitionSpec())
    row = find_row(placed(np.zeros(shape, "float32"), whole))
    assert row.array == f"float32[{','.join(map(str, shape))}]"
    assert row.sharding == "replicated"
    assert row.num_bytes == 4 * int(np.prod(shape))


def test_split_variable_costs_its_part_on_a_device():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "model"))
    split = NamedSharding(mesh, PartitionSpec(None, "model"))
    row = find_row(placed(np.zeros((6, 8), "float32"), split))
    assert row.sharding == "P(None, 'model')"
    assert row.num_bytes == 6 * 2 * 4


def test_variable_elsewhere_is_not_called_replicated():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert find_row(placed(np.zeros(2), one)).sharding == "on cpu:3"
    mesh = NamedSharding(Mesh(jax.devices()[:2], ("r",)), PartitionSpec())
    assert find_row(placed(np.zeros(2), mesh)).sharding == (
        "replicated on 2 devices"
    )


def test_deferred_variable_is_not_built():
    with keras.StatelessScope():
        variable = keras.Variable(
            initializer="zeros", shape=(2, 3), name="later"
        )
        row = find_row(variable)
        assert variable._value is None
    assert row.sharding == "not built"
    assert row.num_bytes == 0


def test_equal_variables_are_one_row_and_all_are_summed_up():
    whole = NamedSharding(Mesh(jax.devices(), ("replica",)), PartitionSpec())
    shapes = (500, 500), (250, 1000), (500, 500)
    rows = [find_row(placed(np.zeros(s, "float32"), whole)) for s in shapes]
    assert describe.summarize(rows) == (
        "3 variables, 750,000 parameters, 3.000 MB on each device, "
        "all replicated"
    )
    lines = show(describe.tabulate(rows))
    (row,) = [line for line in lines if "[500,500]" in line]
    assert row.split()[1:3] == ["+", "1"]
    assert row.split()[-1] == "2.000"
    (row,) = [line for line in lines if "[250,1000]" in line]
    assert "+" not in row


def test_a_variable_that_is_given_twice_is_listed_once():
    variable = keras.Variable(np.zeros(5, "float32"))
    lines = show(describe.describe_table(make_mesh(), [variable, variable]))
    assert any(line.startswith("1 variable, 5 parameters") for line in lines)


def test_the_largest_forty_rows_are_listed():
    rows = [find_row(keras.Variable(np.zeros(i + 1))) for i in range(100)]
    lines = show(describe.tabulate(rows))
    text = "\n".join(lines)
    assert "... and 60 more rows" in text
    assert "[100]" in text
    assert "[60]" not in text
    # Blank, header, rule, 40 rows, "more", blank.
    assert len(lines) == 45


def test_path_with_markup_is_shown_as_it_is():
    variable = keras.Variable(1.0, name="[red]x")
    table = describe.tabulate([find_row(variable)])
    assert "[red]x" in "\n".join(show(table))


def test_a_long_path_is_cut_in_its_middle():
    layer = keras.layers.Dense(1, name="feed_forward_of_the_first_block")
    layer.build((1, 1))
    table = describe.tabulate([find_row(layer.kernel)])
    text = "\n".join(show(table, width=100))
    assert " feed_...e_first_block/kernel " in text


def test_no_variables_is_an_empty_table():
    assert describe.summarize([]).startswith("0 variables, 0 parameters")
    assert len(show(describe.tabulate([]))) < 5


def test_strategy_describes_a_replicated_model_in_a_line(capsys):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layer = keras.layers.Dense(2, name="hidden")
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile("adam", "mse")
    strategy.describe(model)
    mesh, devices, variables = capsys.readouterr().out.splitlines()
    assert mesh.startswith("Mesh: 2 replicas")
    assert devices.split()[-2:] == ["cpu:0,", "cpu:1"]
    assert variables == (
        "6 variables, 12 parameters, 0.000 MB on each device, all replicated"
    )


def test_slots_with_the_same_sharding_are_a_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    partitioner = ks.experimental.FullySharded(shards=8, min_size=64)
    strategy, model = divided_model(partitioner, [(8, 16), (16, 24), (24, 8)])
    strategy.describe(model)
    lines = capsys.readouterr().out.splitlines()
    rows = {
        re.split(r"\s{2,}", line.strip())[-2]: re.search(r"\+ (\d+)", line)
        for line in lines
        if " slots " in line
    }
    assert {sharding: more and more[1] for sharding, more in rows.items()} == {
        "P('replica',)": "2",
        "replicated (small)": "2",
        "replicated": "1",
    }


def divided_model(partitioner, kernels=((6, 24), (24, 13), (13, 31))):
    strategy = ks.MirroredStrategy(variable_partitioner=partitioner)
    with strategy.scope():
        layers = [keras.layers.Dense(shape[1]) for shape in kernels]
        model = keras.Sequential([keras.Input(kernels[0][:1]), *layers])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    return strategy, model


def shardings_shown(strategy, model, capsys):
    """The shardings by path, with remarks, and the text of `describe`."""
    mesh = strategy._runtime.mesh
    partitioner = strategy._runtime.distribution.placements.partitioner
    variables = [*model.variables, *model.optimizer.variables]
    rows = [describe.describe_variable(v, mesh, partitioner) for v in variables]
    cells = {
        row.path: row.sharding + (f" ({row.remark})" if row.remark else "")
        for row in rows
    }
    capsys.readouterr()
    strategy.describe(model)
    text = capsys.readouterr().out
    assert all(f" {cell} " in text for cell in cells.values())
    return cells, text


def test_groups_and_reasons_of_whole_variables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    partitioner = ks.experimental.FullySharded(shards=4, min_size=64)
    strategy, model = divided_model(partitioner)
    cells, text = shardings_shown(strategy, model, capsys)
    first, second, third = model.layers
    assert cells[first.kernel.path] == "P(None, 'replica')"
    assert cells[first.bias.path] == "replicated (small)"
    assert cells[second.kernel.path] == "P('replica',)"
    assert cells[third.kernel.path] == "replicated (indivisible)"
    assert cells[model.optimizer.iterations.path] == "replicated"
    assert (
        "FullySharded(min_size=64) shards variables over 4 replicas, in "
        "each of 2 groups\n" in text
    )


def test_reasons_of_slots_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    partitioner = ks.experimental.SlotsOnly(min_size=64)
    strategy, model = divided_model(partitioner)
    cells, text = shardings_shown(strategy, model, capsys)
    kernel = model.layers[0].kernel
    assert cells[kernel.path] == "replicated (weight)"
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert [cells[v.path] for v in slots] == ["P(None, 'replica')"]
    assert "8 replicas\n" in text


def test_reasons_of_a_function(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def first_of_matrices(path, shape, dtype):
        return 0 if len(shape) == 2 and shape[0] == 24 else None

    strategy, model = divided_model(first_of_matrices)
    cells, text = shardings_shown(strategy, model, capsys)
    first, second, _ = model.layers
    assert cells[first.kernel.path] == "replicated"
    assert cells[second.kernel.path] == "P('replica',)"

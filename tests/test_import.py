"""What importing keras_strategies does, and what it leaves alone."""

import ast
import importlib
import importlib.util
import os
import pathlib
import sys

import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.names import versions
from tests.support.commands import python

ROOT = str(pathlib.Path(__file__).parents[1])
PUBLIC_NAMES = {
    "GradientTape",
    *("abstract", "CompiledProgram", "Plan", "PlannedStep", "MirroredStrategy"),
    *("OneDeviceStrategy", "Strategy", "StrategyExtended", "TPUStrategy"),
    *("experimental_set_strategy", "get_strategy", "DistributedValues"),
    *("DistributedDataset", "DistributedIterator", "InputContext"),
    *("InputOptions", "InputReplicationMode", "MultiWorkerMirroredStrategy"),
    *("Mirrored", "RunOptions", "function", "PerReplica", "ReduceOp"),
    *("ReplicaContext", "ReplicaMesh", "ValueContext", "compute_average_loss"),
    *("by_rows", "get_replica_context", "global_batch_loss", "grad"),
    *("in_cross_replica_context", "scale_regularization_loss"),
    "enable_determinism",
    *("value_and_grad", "has_strategy", "merge", "variable_creator_scope"),
}

CALLBACKS = {"Checkpoint", "RunReport", "Scalars"}


def run_python(code, **environ):
    """Runs code in a fresh process without the variables of this one."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k == versions.SILENCE
        or not k.startswith(("KERAS_", "JAX_", "XLA_", "TF_"))
    }
    environ = {
        "PYTHONPATH": ROOT,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **environ,
    }
    return python(
        "-W",
        "error::UserWarning",
        "-c",
        code,
        env=inherited | environ,
        timeout=400,
    )


def run_and_get_output(code, **environ):
    done = run_python(code, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def run_and_get_error(code, **environ):
    done = run_python(code, **environ)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_public_names():
    values = {name: getattr(ks, name) for name in ks._MODULES}
    names = {name for name, value in values.items() if not _is_module(value)}
    assert names == PUBLIC_NAMES
    assert set(ks._MODULES) <= set(dir(ks))
    for name in names:
        assert values[name].__doc__, name


def test_names_of_callbacks():
    assert set(ks.callbacks._MODULES) == CALLBACKS
    assert set(dir(ks.callbacks)) >= CALLBACKS
    for name in CALLBACKS:
        assert getattr(ks.callbacks, name).__doc__, name
    with pytest.raises(AttributeError, match="Scalar"):
        ks.callbacks.Scalar  # noqa: B018


def test_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="MirorredStrategy"):
        ks.MirorredStrategy  # noqa: B018


@pytest.mark.parametrize(
    ("module", "name", "way_out"),
    [
        (ks, "ParameterServerStrategy", "ks.MultiWorkerMirroredStrategy"),
        (ks, "CentralStorageStrategy", "ks.MirroredStrategy"),
        (ks, "HierarchicalCopyAllReduce", "XLA chooses"),
        (ks, "NcclAllReduce", "XLA chooses"),
        (ks, "ReductionToOneDevice", "XLA chooses"),
        (ks.experimental, "ParameterServerStrategy", "FullySharded"),
        (ks.experimental, "CollectiveHints", "CommunicationOptions"),
        (ks, "Server", "keras-strategies launch"),
        (ks.experimental, "PreemptionCheckpointHandler", "ks.callbacks.Chec"),
        (ks.experimental, "PreemptionWatcher", "ks.callbacks.Checkpoint"),
        (ks.experimental, "TerminationConfig", "ks.callbacks.Checkpoint"),
        (ks.experimental, "partitioners", "FullySharded"),
        (ks.experimental, "FixedShardsPartitioner", "min_size"),
        (ks.cluster_resolver, "GCEClusterResolver", "SimpleClusterResolver"),
        (ks.estimator, "tpu", "train_distribute=ks.TPUStrategy"),
    ],
)
def test_names_of_tf_that_are_not_here_name_the_way_out(module, name, way_out):
    with pytest.raises(AttributeError, match=name) as caught:
        getattr(module, name)
    assert way_out in str(caught.value)
    assert not hasattr(module, name)
    assert name not in dir(module)


def test_every_public_name_of_tf_distribute_is_here_or_says_what_to_use():
    for theirs, ours in (
        (tf.distribute, ks),
        (tf.distribute.experimental, ks.experimental),
        (tf.distribute.cluster_resolver, ks.cluster_resolver),
    ):
        for name in dir(theirs):
            if not name.startswith("_") and not hasattr(ours, name):
                with pytest.raises(
                    AttributeError, match=r" not supported\. Use "
                ):
                    getattr(ours, name)


def test_names_of_experimental():
    names = {n for n in dir(ks.experimental) if not n.startswith("_")}
    assert names == {
        *("CommunicationImplementation", "CommunicationOptions"),
        *("FullySharded", "MultiWorkerMirroredStrategy", "Replicated"),
        *("SlotsOnly", "TPUStrategy", "ValueContext"),
        *("blocked_head", "linear_cross_entropy"),
        *("scan_blocks", "transformer_layout"),
    }
    for name in names:
        assert getattr(ks.experimental, name).__doc__, name


@pytest.mark.parametrize(
    "module", [ks, ks.cluster_resolver, ks.estimator, ks.callbacks], ids=str
)
def test_dir_lists_public_names_only(module):
    names = [name for name in dir(module) if not name.startswith("__")]
    assert sorted(names) == sorted(module._MODULES)


def _is_module(value):
    return isinstance(value, type(sys))


def test_import_alone_loads_nothing_and_sets_the_backend(tmp_path):
    code = """
import os, sys, keras_strategies
print(sorted({"keras", "jax", "numpy"} & set(sys.modules)))
for name in dir(keras_strategies):
    getattr(keras_strategies, name)
heavy = {"tensorflow", "orbax", "grain", "torch", "tensorboardX"}
print(sorted(heavy & set(sys.modules)))
import keras
print(os.environ["KERAS_BACKEND"], keras.config.backend())
"""
    expected = ["[]", "[]", "jax", "jax"]
    assert run_and_get_output(code, KERAS_HOME=str(tmp_path)) == expected


def test_equal_blocks_are_found_without_tensorflow():
    code = """
import sys, keras_strategies as ks, keras
from keras import layers
blocks = [layers.Dense(8, "tanh", kernel_regularizer="l2") for _ in range(8)]
model = keras.Sequential([keras.Input((8,)), *blocks])
print(len(ks.experimental.scan_blocks(model)[0]), "tensorflow" in sys.modules)
"""
    assert run_and_get_output(code) == ["8", "False"]


def test_import_after_keras_is_quick_and_changes_nothing():
    code = f"""
import compileall, gc, os, sys, time
start = time.process_time()  # Others may keep the machine busy.
import keras
of_keras = time.process_time() - start
from keras.src.losses import loss
def held():
    return (keras.Model.compile, keras.Variable.__init__, loss.reduce_values,
            keras.layers.BatchNormalization.__init__)
# An installed package is compiled to bytecode; so is this.
assert compileall.compile_dir({os.path.dirname(ks.__file__)!r}, quiet=1)
os.environ.pop("KERAS_BACKEND")
before, modules = held(), set(sys.modules)
gc.disable()  # Or one over all of Keras's objects may fall into our import.
start = time.process_time()
import keras_strategies
for name in dir(keras_strategies):
    getattr(keras_strategies, name)
seconds = time.process_time() - start
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
heavy = {{"tensorflow", "orbax", "grain", "torch", "rich", "tensorboard"}}
new = {{name.split(".")[0] for name in set(sys.modules) - modules}}
print(sorted(heavy & new), len([n for n in new if n == "keras_strategies"]))
print(held() == before, keras.distribution.distribution())
# The backend of a Keras that was imported is not chosen again.
print("KERAS_BACKEND" in os.environ)
import jax
jax.devices()
assert xla_bridge.backends_are_initialized()
print(of_keras, seconds)
"""
    ratios = []
    for _ in range(3):  # A busy machine's caches cost either import CPU time.
        *found, of_keras, seconds = run_and_get_output(
            code, KERAS_BACKEND="jax"
        )
        assert found == ["False", "[]", "1", "True", "None", "False"]
        ratios.append(float(seconds) / float(of_keras))
        if ratios[-1] < 1 / 13:  # 0.05 of it; 0.1 s on a quiet machine.
            return
    raise AssertionError(ratios)


def test_backend_that_was_chosen_is_not_changed():
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    code = "import keras_strategies"
    error = run_and_get_error(code, KERAS_BACKEND="tensorflow")
    assert error.startswith("ImportError: keras_strategies needs Keras on")
    assert "backend 'tensorflow'" in error
    assert "KERAS_BACKEND=jax" in error


def test_nnx_variables_are_refused():
    of_keras = """
import keras
from keras.src.backend import config
config._NNX_ENABLED = True  # Keras itself would not import without flax.
assert keras.config.is_nnx_enabled()
import keras_strategies
"""
    for code, environ in (
        (of_keras, {}),
        ("import keras_strategies", {"KERAS_NNX_ENABLED": "true"}),
    ):
        error = run_and_get_error(code, KERAS_BACKEND="jax", **environ)
        assert "keras_strategies does not support NNX variables" in error
        assert "KERAS_NNX_ENABLED" in error


def test_backend_that_is_changed_after_import_is_noticed():
    code = """
import os, keras_strategies
os.environ["KERAS_BACKEND"] = "numpy"
keras_strategies.MirroredStrategy
"""
    assert "backend 'numpy'" in run_and_get_error(code)


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_command_starts_under_any_backend(words):
    code = f"""
import runpy, sys
sys.orig_argv = ["python", "-m", "keras_strategies.cli", *{words}]
sys.argv = ["-m", *{words}]
runpy.run_module("keras_strategies.cli", run_name="__main__", alter_sys=True)
"""
    done = run_python(code, KERAS_BACKEND="tensorflow", KERAS_NNX_ENABLED="1")
    assert done.returncode == 0, done.stderr


STUBS = sorted(pathlib.Path(ks.__file__).parent.rglob("*.pyi"))


def test_public_modules_have_stubs():
    assert len(STUBS) == 7


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_a_stub_has_the_names_of_its_module(stub):
    """Type checkers read the stub, Python reads `_MODULES`."""
    root = pathlib.Path(ks.__file__).parents[1]
    place = stub.relative_to(root).with_suffix("")
    name = ".".join(place.parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    found = {}
    for node in ast.parse(stub.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname: node.module for alias in node.names}
    assert set(found) == set(module._MODULES)
    for public, source in found.items():
        there = getattr(importlib.import_module(source), public, None)
        if there is None:
            there = importlib.import_module(f"{source}.{public}")
        assert getattr(module, public) is there

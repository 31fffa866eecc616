"""Programs that compute the same bits in every run."""

import os
import re

import jax
import keras
import pytest

import keras_strategies as ks
from keras_strategies.gpu.determinism import is_enabled
from tests.support.commands import python

FLAG = "--xla_gpu_deterministic_ops"
NAMES = ("XLA_FLAGS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")


@pytest.fixture
def environment(monkeypatch):
    """An environment without the variables, restored after the test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def with_gpus(monkeypatch):
    """JAX has started GPUs."""
    jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *platform: ["a GPU"])


def test_the_variables_are_set_once(environment):
    environment.setenv("XLA_FLAGS", "--xla_dump_to=a")
    environment.setenv("NCCL_NVLS_ENABLE", "2")
    for _ in range(2):
        ks.enable_determinism()
        found = [os.environ[name] for name in NAMES]
        assert found == [f"--xla_dump_to=a {FLAG}=true", ":4096:8", "2"]


def test_a_flag_that_says_no_is_overruled(environment):
    environment.setenv("XLA_FLAGS", f"{FLAG}=false")
    ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=false {FLAG}=true"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        (FLAG, True),
        (f"{FLAG}=true --xla_dump_to=a", True),
        (f"{FLAG}=TRUE", True),
        (f"{FLAG}=1", True),
        (f"{FLAG}=false", False),
        (f"{FLAG}=true {FLAG}=0", False),
        (f"{FLAG}_of_others=true", False),
        (f"'{FLAG}=true", False),
    ],
)
def test_the_last_of_a_flag_counts(flags, expected):
    assert is_enabled({"XLA_FLAGS": flags}) == expected


def test_a_call_after_gpus_were_started_is_refused(environment, with_gpus):
    with pytest.raises(RuntimeError, match=r"must.*Received.*beginning of"):
        ks.enable_determinism()
    assert not any(name in os.environ for name in NAMES)


def test_gpus_that_started_with_the_flag_are_accepted(environment, with_gpus):
    environment.setenv("XLA_FLAGS", f"{FLAG}=true")
    ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=true"


CODE = """
import keras_strategies as ks

ks.enable_determinism()

from tests.gpu.test_determinism import compile_step

print(compile_step())
"""
SUM = re.compile(r" scatter\(.*$", re.MULTILINE)


def compile_step(**options):
    """The text of a step whose gradient adds to rows and to pixels."""
    strategy = ks.MirroredStrategy.for_topology("h100:2")
    layers = keras.layers
    with strategy.scope(), ks.abstract():
        tokens = keras.Input((64,), dtype="int32")
        x = layers.Embedding(500, 8)(tokens)
        x = layers.MaxPooling2D(3, strides=2)(layers.Reshape((8, 8, 8))(x))
        x = layers.Dense(4)(layers.Flatten()(x))
        model = keras.Model(tokens, x)
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((8, 64), "int32")
    y = jax.ShapeDtypeStruct((8, 4), "float32")
    return strategy.compile_step(model, (x, y), **options).as_text()


def is_sorted(text):
    """Whether each sum is over sorted places, without atomic additions."""
    sums = SUM.findall(text)
    assert len(sums) == 2
    sorted_ = ["indices_are_sorted=true" in one for one in sums]
    once = ["unique_indices=true" in one for one in sums]
    assert sorted_ == once == [sorted_[0]] * 2
    return sorted_[0]


@pytest.mark.gpu
def test_sums_have_no_order_unless_it_is_asked_for():
    assert not is_sorted(compile_step())


@pytest.mark.gpu
def test_one_program_may_ask_for_an_order():
    options = {"xla_gpu_deterministic_ops": True}
    assert is_sorted(compile_step(compiler_options=options))


@pytest.mark.gpu
def test_all_programs_of_a_process_have_an_order():
    done = python("-c", CODE, env=dict(os.environ), timeout=240)
    assert done.returncode == 0, done.stderr
    assert is_sorted(done.stdout)

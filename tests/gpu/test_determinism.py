"""Sums in steps for absent GPUs whose order may differ from run to run."""

import os
import re

import jax
import keras
import pytest

import keras_strategies as ks
from tests.support.commands import python

pytestmark = pytest.mark.gpu

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


def test_sums_have_no_order_unless_it_is_asked_for():
    assert not is_sorted(compile_step())


def test_one_program_may_ask_for_an_order():
    options = {"xla_gpu_deterministic_ops": True}
    assert is_sorted(compile_step(compiler_options=options))


def test_all_programs_of_a_process_have_an_order():
    done = python("-c", CODE, env=dict(os.environ), timeout=240)
    assert done.returncode == 0, done.stderr
    assert is_sorted(done.stdout)

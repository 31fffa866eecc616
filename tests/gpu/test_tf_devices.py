"""TensorFlow's GPUs, which are hidden from it; one is pretended.

TensorFlow itself decides what may be changed: the pretended GPU is in its own
lists.
"""

import os
import pathlib
import textwrap

import pytest

from tests.support.combinations import combine
from tests.support.commands import python

ROOT = pathlib.Path(__file__).parents[2]

PRETEND = """
import sys, warnings
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
import keras_strategies as ks
from keras_strategies.gpu import topology_devices

def pretend():
    state = context.context()
    state._initialize_physical_devices()
    gpu = context.PhysicalDevice("/physical_device:GPU:0", "GPU")
    state._physical_devices.append(gpu)
    state._visible_device_list.append(gpu)
    state._memory_growth_map[gpu] = False
    tf.test.is_built_with_gpu_support = lambda: HAS_GPU_BUILD
    return gpu

def visible():
    return len(tf.config.get_visible_devices("GPU"))

HAS_GPU_BUILD = True
warnings.simplefilter("error")
"""


def run(code):
    code = PRETEND + textwrap.dedent(code)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = python("-c", code, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.multi_process
def test_gpus_are_hidden_when_a_strategy_uses_gpus():
    assert run("""
    pretend()
    ks.MirroredStrategy()  # Of CPU devices.
    print(visible())
    topology_devices.note_platform("gpu")
    print(visible())
    tf.constant(1)  # Initializes TensorFlow's devices.
    print(visible())
    """) == ["1", "0", "0"]


@pytest.mark.slow
def test_gpus_in_use_are_reported_with_the_fix():
    assert run("""
    dataset = tf.data.Dataset.from_tensor_slices(np.ones((8, 2))).batch(4)
    pretend()
    strategy = ks.MirroredStrategy()
    strategy.experimental_distribute_dataset(dataset)
    print("silent")
    topology_devices._uses_gpus = True
    try:
        strategy.experimental_distribute_dataset(dataset)
    except UserWarning as warning:
        text = str(warning)
        assert "has initialized 1 GPUs" in text, text
        assert "tf.config.set_visible_devices([], 'GPU')" in text
        print("warned", visible())
    """) == ["silent", "warned", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    combine(
        [
            "HAS_GPU_BUILD = False",
            "tf.config.experimental.set_memory_growth(g, 1)",
        ],
        every=2,
    ),
)
def test_gpus_that_take_no_memory_are_left_alone(code):
    assert run(f"""
    g = pretend()
    {code}
    topology_devices.note_platform("gpu")
    print(visible())
    """) == ["1"]

"""Devices of absent GPUs, by name."""

import importlib.metadata
import subprocess
import sys

import jax
import jaxlib
import keras
import numpy as np
import pytest
from jax.experimental import topologies

import keras_strategies as ks
from keras_strategies.gpu.topology_devices import (
    TARGETS,
    complete_options,
    is_absent_gpu,
    make_gpu_devices,
)

WRONG = [
    *("h100", "h100:0", "h100:8x", "h100:8x8x8", "h100:9999x9", "H100:8"),
    *("h100:٣", "h100:8x1٣", "h100:" + "9" * 5000, "", None, 8),
]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_refused_with_the_names_that_exist(name):
    with pytest.raises(ValueError, match=r"a100, h100, h200, b200.*Received"):
        make_gpu_devices(name)


@pytest.mark.parametrize("name", ["h101:8", "a10:8"])
def test_an_unknown_generation_names_tpus_and_gpus(name):
    with pytest.raises(ValueError, match="v5e:4x4.*h100:8"):
        ks.MirroredStrategy.for_topology(name)


def test_several_slices_of_gpus_are_refused():
    with pytest.raises(ValueError, match=r"num_slices=2.*h100:8x8"):
        ks.MirroredStrategy.for_topology("h100:8", num_slices=2)


def test_devices_that_are_present_need_no_options():
    device = jax.devices()[0]
    assert not is_absent_gpu(device)
    assert complete_options(None, [device]) is None
    assert complete_options({"a": 1}, [device]) == {"a": 1}


@pytest.mark.gpu
def test_replicas_that_leave_gpus_out_are_refused():
    with pytest.raises(ValueError, match=r"must use all.*\[3, 1, 1, 1\].*Pass"):
        ks.MirroredStrategy.for_topology(
            "h100:4", computation_shape=[3, 1, 1, 1]
        )


@pytest.mark.gpu
def test_a_plan_s_program_is_deterministic_after_enable_determinism(
    monkeypatch,
):
    """XLA has read its flags before."""
    strategy = ks.MirroredStrategy.for_topology("h100:2")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), keras.layers.Embedding(500, 8)]
        )
        model.compile("sgd", "mse")
    batch = np.zeros((32, 4), "int32"), np.zeros((32, 4, 8), "float32")
    for name in ("XLA_FLAGS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")
    for is_deterministic in (False, True):
        text = strategy.compile_step(model, batch).executable.as_text()
        # The indices of the embedding's gradient are sorted.
        assert (" sort(" in text) == is_deterministic
        ks.enable_determinism()


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", TARGETS)
def test_each_gpu_compiles_a_step(gpu):
    strategy = ks.MirroredStrategy.for_topology(f"{gpu}:2x2")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(4, "tanh")]
        )
        model.compile("sgd", "mse")
    batch = np.zeros((32, 16), "float32"), np.zeros((32, 4), "float32")
    program = strategy.compile_step(model, batch)
    assert program.num_replicas == 4
    assert program.collectives["all-reduce"] == 1
    devices = strategy.mesh.devices
    assert [d.process_index for d in devices] == [0, 0, 1, 1]
    assert {d.device_kind for d in devices} == {TARGETS[gpu].device_kind}
    with pytest.raises(RuntimeError, match="only compile") as caught:
        model.fit(*batch, verbose=0)
    assert "TPU" not in str(caught.value)


@pytest.mark.gpu
def test_cuda_that_jax_did_not_find_is_explained():
    code = (
        "from keras_strategies.gpu.topology_devices import make_gpu_devices\n"
        "make_gpu_devices('h100:8')"
    )
    environment = {"PATH": "/usr/bin:/bin", "KERAS_BACKEND": "jax"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "JAX_PLATFORMS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "JAX_PLATFORMS=cpu" in result.stderr


@pytest.mark.parametrize(
    "versions", [{}, {"jax-cuda12-plugin": "0.1.0"}], ids=["none", "old"]
)
def test_a_plugin_that_does_not_load_is_explained(monkeypatch, versions):
    def find(name):
        if name == "jaxlib":
            return jaxlib.__version__
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def fail(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(ImportError, match="pip install") as caught:
        make_gpu_devices("h100:8")
    assert all(version in str(caught.value) for version in versions.values())
    assert "JAX_PLATFORMS=cpu" in str(caught.value)

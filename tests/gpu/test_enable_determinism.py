"""The environment of programs that compute the same bits in every run."""

import os

import jax
import pytest

import keras_strategies as ks
from keras_strategies.gpu.determinism import is_enabled

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


def test_flags_in_a_file_are_kept(environment, tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_dump_to=a\n--xla_b=1\n")
    environment.setenv("XLA_FLAGS", str(file))
    assert not is_enabled(os.environ)
    ks.enable_determinism()
    found = os.environ["XLA_FLAGS"].split()
    assert found == ["--xla_dump_to=a", "--xla_b=1", f"{FLAG}=true"]


def test_the_flag_in_a_file_counts(environment, tmp_path):
    file = tmp_path / "flags"
    file.write_text(f"{FLAG}=true\n")
    environment.setenv("XLA_FLAGS", str(file))
    ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == str(file)


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

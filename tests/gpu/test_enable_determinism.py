"""The environment of programs that compute the same bits in every run."""

import os

import jax
import pytest

import keras_strategies as ks
from keras_strategies.gpu.xla_flags import is_deterministic, read_flags

FLAG = "--xla_gpu_deterministic_ops"
NAMES = ("XLA_FLAGS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")


@pytest.fixture
def environment(monkeypatch):
    """An environment without the variables, restored after the test."""
    # XLA reads its flags only once: those of `conftest.py`, for all tests.
    jax.devices()
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def with_gpus(monkeypatch):
    """JAX has started GPUs."""
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
    assert not is_deterministic(os.environ)
    ks.enable_determinism()
    found = os.environ["XLA_FLAGS"].split()
    assert found == ["--xla_dump_to=a", "--xla_b=1", f"{FLAG}=true"]


def test_the_flag_in_a_file_counts(environment, tmp_path):
    file = tmp_path / "flags"
    file.write_text(f"{FLAG}=true\n")
    environment.setenv("XLA_FLAGS", str(file))
    ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == str(file)


@pytest.mark.parametrize("name", ["none", "", "x\0y"])
def test_a_file_that_cannot_be_read_is_refused(name, tmp_path):
    environ = {"XLA_FLAGS": f"{tmp_path}/{name}"}
    with pytest.raises(ValueError, match=r"must.*Received.*Correct"):
        read_flags(environ)
    assert not is_deterministic(environ)


def test_flags_are_read_as_xla_reads_them(tmp_path):
    assert read_flags({}) == read_flags({"XLA_FLAGS": " "}) == ""
    assert read_flags({"XLA_FLAGS": "  --xla_a=1 "}) == "--xla_a=1"
    file = tmp_path / "flags"
    file.write_bytes(b"--xla_a='\xff'\n")
    assert read_flags({"XLA_FLAGS": str(file)}) == "--xla_a='\udcff'"


@pytest.mark.parametrize(
    "flags",
    [
        "--xla_a='x",
        '--xla_a="x\\"',
        "--xla_a='x' --xla_b='y",
        "--xla_a=1 stray",
        "--xla_a='x' stray --xla_b=1",
        "--xla_a=o'x --xla_b=1",
    ],
)
@pytest.mark.parametrize("is_in_file", [False, True])
def test_flags_that_xla_reads_in_part_are_refused(
    environment, tmp_path, flags, is_in_file
):
    if is_in_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    environment.setenv("XLA_FLAGS", flags)
    with pytest.raises(ValueError, match=r"must.*quote.*Received.*Correct"):
        ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize(
    "flags",
    [
        """--xla_a='x y "' --xla_b=1""",
        '--xla_a="x \\" --xla_c=\'"',
        "--xla_a='x'--xla_b='y'",
        "-" * 100_000,
    ],
)
def test_flags_that_xla_reads_whole_are_accepted(flags):
    assert read_flags({"XLA_FLAGS": flags}) == flags


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
    assert is_deterministic({"XLA_FLAGS": flags}) == expected


def test_a_call_after_gpus_were_started_is_refused(environment, with_gpus):
    with pytest.raises(RuntimeError, match=r"must.*already.*beginning of"):
        ks.enable_determinism()
    assert not any(name in os.environ for name in NAMES)


def test_gpus_that_started_with_the_flag_are_accepted(environment, with_gpus):
    environment.setenv("XLA_FLAGS", f"{FLAG}=true")
    ks.enable_determinism()
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=true"

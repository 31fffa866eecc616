"""Where compiled programs are cached, and when they are not."""

import os
import pathlib
import subprocess
import sys

import pytest

from keras_strategies.cluster.job import compilation_cache

FOLDER = "JAX_COMPILATION_CACHE_DIR"


def make(folder, **more):
    return compilation_cache.make_settings(
        {"XDG_CACHE_HOME": str(folder), **more}
    )


def test_the_folder_is_the_users_own(tmp_path):
    settings = make(tmp_path / "new")
    folder = pathlib.Path(settings[FOLDER])
    assert folder.parent == tmp_path / "new" / "keras_strategies"
    for path in (folder, folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert int(settings["JAX_COMPILATION_CACHE_MAX_SIZE"]) == 4 * 2**30
    assert make(tmp_path / "new") == settings
    kept = make(tmp_path, JAX_COMPILATION_CACHE_MAX_SIZE="5")
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in kept


def test_another_cpu_has_another_folder(tmp_path, monkeypatch):
    before = make(tmp_path)
    (tmp_path / "cpuinfo").write_text("flags : fpu avx\nprocessor : 3\n")
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "cpuinfo")
    other = make(tmp_path)
    assert other != before
    # Another core of the same CPU is no difference.
    (tmp_path / "cpuinfo").write_text("flags : fpu avx\nprocessor : 4\n")
    assert make(tmp_path) == other
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "none")
    assert FOLDER in make(tmp_path)


@pytest.mark.parametrize(
    "environ",
    [
        {FOLDER: "mine"},
        {FOLDER: ""},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    ],
)
def test_what_the_user_has_set_stays(tmp_path, environ):
    assert make(tmp_path, **environ) == {}
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog):
    (tmp_path / "keras_strategies").mkdir(mode=0o777)
    (tmp_path / "keras_strategies").chmod(0o777)
    assert make(tmp_path) == {}
    (line,) = caplog.messages
    assert "other users can write to" in line
    assert "JAX_COMPILATION_CACHE_DIR" in line


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file") == {}
    (line,) = caplog.messages
    assert "Not a directory" in line
    caplog.clear()
    compilation_cache.make_settings(
        {"XDG_CACHE_HOME": str(tmp_path / "file")}, warns=False
    )
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


SCRIPT = """
import sys, numpy as np
import keras_strategies as ks
import jax, keras
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name.endswith("cache_hits"))
)
keras.utils.set_random_seed(0)
with ks.MirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
saved = ks.callbacks.Checkpoint(sys.argv[1])
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[saved])
weights = b"".join(w.tobytes() for w in model.get_weights())
print(jax.config.jax_compilation_cache_dir, sum(hits), weights.hex())
"""


@pytest.mark.multi_process
def test_a_job_that_is_started_again_compiles_nothing_again(tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    found = []
    for run in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / f"run{run}")],
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        assert "ache" not in ended.stderr
        found.append(ended.stdout.split())
    (folder, cold, weights), (_, hits, again) = found
    assert folder.startswith(str(tmp_path / "cache" / "keras_strategies"))
    assert cold == "0"
    assert int(hits) >= 2
    assert again == weights

"""Where compiled programs are cached, and when they are not."""

import concurrent.futures
import grp
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import types

import filelock
import pytest

from keras_strategies.job import compilation_cache

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"


def make(directory, **more):
    return compilation_cache.make_settings(
        {"XDG_CACHE_HOME": str(directory), **more}
    )


def test_the_directory_is_the_users_own(tmp_path):
    settings = make(tmp_path / "new")
    directory = pathlib.Path(settings[DIRECTORY])
    assert directory.parent == tmp_path / "new" / "keras_strategies"
    for path in (directory, directory.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert int(settings["JAX_COMPILATION_CACHE_MAX_SIZE"]) == 4 * 2**30
    assert make(tmp_path / "new") == settings
    kept = make(tmp_path, JAX_COMPILATION_CACHE_MAX_SIZE="5")
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in kept


def test_another_cpu_has_another_directory(tmp_path, monkeypatch):
    before = make(tmp_path)
    (tmp_path / "cpuinfo").write_text("flags : fpu avx\nprocessor : 3\n")
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "cpuinfo")
    other = make(tmp_path)
    assert other != before
    # Another core of the same CPU is no difference.
    (tmp_path / "cpuinfo").write_text("flags : fpu avx\nprocessor : 4\n")
    assert make(tmp_path) == other
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "none")
    assert DIRECTORY in make(tmp_path)


@pytest.mark.parametrize(
    "environ",
    [
        {DIRECTORY: "mine"},
        {DIRECTORY: ""},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    ],
)
def test_what_the_user_has_set_stays(tmp_path, environ):
    assert make(tmp_path, **environ) == {}
    assert not list(tmp_path.iterdir())


ME = os.geteuid()
OWNERS = {"me": ME, "root": 0, "stranger": ME + 1}
# Groups with the members that /etc/group and /etc/passwd list.
GROUPS = {"root": 0, "me": 7001, "many": 7002, "unnamed": 7004}
# Each line: a path below the test's directory with its mode, owner and group,
# or a link with its target and owner. XDG_CACHE_HOME is "home/cache"; "K" and
# "F" are the package's directories in it.
TREES = {
    "new": ("", True),
    "others read": ("home 755|K 755|F 700", True),
    "others read it": ("home 755|K 755|F 755", False),
    "home of all": ("home 777", False),
    "home like /tmp": ("home 1777", True),
    "home of many": ("home 775 me:many", False),
    "home of my group": ("home 775 me:me", True),
    "home of an unnamed group": ("home 775 me:unnamed", True),
    "home of root's group": ("home 775 me:root", True),
    "home of root and its group": ("home 775 root:root", True),
    "home of root": ("home 755 root:root", True),
    "home of root and many": ("home 775 root:many", False),
    "home of a stranger": ("home 755 stranger:me", False),
    "home of a stranger like /tmp": ("home 1777 stranger:me", False),
    "a stranger was faster": ("home/cache 1777|K 755 stranger:me", False),
    "package's of all": ("K 777", False),
    "package's like /tmp": ("K 1777|F 700", True),
    "package's is a file": ("home/cache 755|K file 644", False),
    "directory of all": ("F 777", False),
    "directory like /tmp": ("F 1777", False),
    "directory of many": ("F 775 me:many", False),
    "directory of my group": ("F 775 me:me", False),
    "directory of a stranger": ("F 755 stranger:me", False),
    "directory is a file": ("K 755|F file 644", False),
    "link": ("other 755|home 755|home/cache -> ../other me", True),
    "link of root": ("other 755|home 755|home/cache -> ../other root", True),
    "link to a directory of all": (
        "other 777|home 755|home/cache -> ../other me",
        False,
    ),
    "link below a directory of all": (
        "open 777|open/other 755|home 755|home/cache -> ../open/other me",
        False,
    ),
    "link to a link": (
        "other 755|one -> other me|home 755|home/cache -> ../one me",
        True,
    ),
    "link to itself": ("home 755|home/cache -> cache me", False),
    "link to nothing": ("home 755|home/cache -> none me", True),
    "directory is a link": ("other 700|K 755|F -> ../../../other me", True),
    "entries": ("F 700|F/a-cache file 666|F/a-atime file 644", True),
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Makes a tree of `TREES`; owners are only said, which needs no root."""
    owners = {}
    package = "home/cache/keras_strategies"
    directory = (
        f"{package}/{pathlib.Path(make(tmp_path / 'x')[DIRECTORY]).name}"
    )
    shutil.rmtree(tmp_path / "x")

    def get_path(name):
        first, *rest = name.split("/")
        first = {"K": package, "F": directory}.get(first, first)
        return tmp_path.joinpath(first, *rest)

    def create(text):
        for line in filter(None, text.split("|")):
            name, *words = line.split()
            path = get_path(name)
            path.parent.mkdir(0o755, parents=True, exist_ok=True)
            if words[0] == "->":
                path.symlink_to(words[1])
                owners[path] = OWNERS[words[2]], GROUPS["many"]
                continue
            if words[0] == "file":
                path.write_bytes(b"")
            else:
                path.mkdir(exist_ok=True)
            path.chmod(int(words[words[0] == "file"], 8))
            if ":" in words[-1]:
                owner, group = words[-1].split(":")
                owners[path] = OWNERS[owner], GROUPS[group]

    def lstat(path):
        found = list(os.lstat(path))
        found[4:6] = owners.get(pathlib.Path(path), (found[4], GROUPS["many"]))
        return os.stat_result(found)

    def find_group(number):
        for name, known in GROUPS.items():
            if known == number and name != "unnamed":
                return types.SimpleNamespace(gr_name=name)
        raise KeyError(number)

    me = types.SimpleNamespace(pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: me)
    monkeypatch.setattr(grp, "getgrgid", find_group)
    monkeypatch.setattr(compilation_cache, "_lstat", lstat)
    return create


@pytest.mark.parametrize("name", TREES)
def test_directories_that_others_can_change_are_not_used(
    name, tree, tmp_path, caplog
):
    text, expected = TREES[name]
    tree(text)
    base = tmp_path / "home" / "cache"
    for _ in range(2):
        assert (DIRECTORY in make(base)) == expected
    if expected:
        assert caplog.messages == []
        return
    (line,) = caplog.messages  # It is said once.
    assert "chmod go-w" in line
    assert DIRECTORY in line


def test_a_group_of_a_user_without_a_name_is_not_private(
    tree, tmp_path, monkeypatch
):
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    tree("K 775 me:many")
    assert make(tmp_path / "home" / "cache") == {}


def test_a_umask_that_lets_others_write_makes_a_private_directory(tmp_path):
    before = os.umask(0)
    try:
        assert DIRECTORY in make(tmp_path / "a" / "b")
        assert DIRECTORY in make(tmp_path / "a" / "b")
    finally:
        os.umask(before)


def test_programs_that_were_not_finished_are_deleted(tmp_path):
    directory = pathlib.Path(make(tmp_path)[DIRECTORY])
    for name in ("a-cache", "a-atime", "b-cache", "c-atime", "d"):
        (directory / name).write_bytes(b"1")
    with filelock.FileLock(directory / ".lockfile"):
        threading.Timer(
            0.3, (directory / "b-atime").write_bytes, [b"1"]
        ).start()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(make, tmp_path)
            while not (directory / "b-atime").exists():
                assert not waiting.done()
    assert (directory / "b-cache").exists(), "another process was writing it"
    (directory / "b-atime").unlink()
    assert DIRECTORY in make(tmp_path)
    names = {path.name for path in directory.iterdir()} - {".lockfile"}
    assert names == {"a-cache", "a-atime", "d"}


KILLED = """
import os, resource, signal, sys
import jax
from keras_strategies.job import compilation_cache

compilation_cache.enable(warns=True)
step, factor = sys.argv[1:]


def kill(event, arguments):
    path = str(arguments[0]) if event == "open" else ""
    if path.endswith("-atime") and not os.path.exists(path):
        os.kill(os.getpid(), signal.SIGKILL)


if step == "program":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
elif step == "time":
    sys.addaudithook(kill)
jax.jit(lambda x: x * float(factor))(1.0).block_until_ready()
"""


@pytest.mark.multi_process
def test_a_run_after_a_killed_write_caches(tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    found = []
    for step, code in (
        ("program", -signal.SIGXFSZ),
        ("time", -signal.SIGKILL),
        ("end", 0),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, step, str(len(found) + 2)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == code, ended.stderr
        assert "ache" not in ended.stderr
        names = {path.name for path in tmp_path.glob("*/jax-*/*")}
        programs = {n[:-6] for n in names if n.endswith("-cache")}
        times = {n[:-6] for n in names if n.endswith("-atime")}
        found.append((len(programs - times), len(times)))
    # The numbers of programs that are not finished, and of those that are.
    assert found[:2] == [(1, 0), (1, 0)]
    assert found[2][0] == 0
    assert found[2][1] > 0


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path, caplog):
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
    (directory, cold, weights), (_, hits, again) = found
    assert directory.startswith(str(tmp_path / "cache" / "keras_strategies"))
    assert cold == "0"
    assert int(hits) >= 2
    assert again == weights

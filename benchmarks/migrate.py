"""Ports public scripts, and runs what is ported on random data.

tests/migrate/scripts.txt lists the scripts, by their address and commit. They
are not copied into the project: download those that you want to try into a
directory, as OWNER+REPOSITORY/PATH. A line that ends in "run" is a script that
was read, and needs no data but what is random here; others are only ported.

    ./run bench migrate DIRECTORY

A script runs on four virtual CPU devices (in two processes of two, if it has a
MultiWorkerMirroredStrategy), for at most two epochs of a few steps.
"""

import argparse
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).parents[1]
LIST = ROOT / "tests" / "migrate" / "scripts.txt"
LIMIT_S = 300
ROWS = 256
SHAPES = {
    "mnist": (28, 28),
    "fashion_mnist": (28, 28),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}


def read_list():
    """Yields the owner and repository, the path, and whether to run it."""
    for line in LIST.read_text("utf-8").splitlines():
        match = re.match(
            r"https://github.com/([^/]+/[^/]+)/blob/\w{40}/(\S+)( run)?$", line
        )
        if match:
            yield match[1].replace("/", "+"), match[2], bool(match[3])


def port(directory, repository, path):
    """Ports a script with the files beside it.

    Returns:
      The directory of the port, the lines changed in it, and the texts about
      those left in the script.
    """
    from keras_strategies.migrate.project import find_files, port_files

    target = pathlib.Path(tempfile.mkdtemp()) / repository
    shutil.copytree(directory / repository, target)
    script = target / path
    files = find_files([str(script.parent)])
    reports = port_files(files)
    for report in reports:
        report.write()
    (report,) = [each for each in reports if each.path == str(script)]
    return script, report.num_changed, [text for _, text in report.left]


def run(script):
    """Runs a ported script; returns its exit status and its last line."""
    is_job = "MultiWorker" in script.read_text("utf-8")
    command = [sys.executable, str(pathlib.Path(__file__)), "--child"]
    if is_job:
        command = [
            *(sys.executable, "-m", "keras_strategies.cli", "launch"),
            *("--processes", "2", "--devices-per-process", "2"),
            *command[1:],
        ]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    if not is_job:
        flags = "--xla_force_host_platform_device_count=4"
        environment["XLA_FLAGS"] = flags
    try:
        done = subprocess.run(
            [*command, str(script)],
            cwd=script.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"more than {LIMIT_S} s"
    lines = (done.stdout if not done.returncode else done.stderr).splitlines()
    return done.returncode, next((x for x in lines[::-1] if x.strip()), "")


def run_child(script):
    """In a process of its own: runs a script on random data."""
    import keras_strategies as ks  # noqa: I001
    import keras
    import numpy as np

    assert ks
    random = np.random.default_rng(0)

    def make(shape, rows, classes=10):
        x = random.integers(0, 256, (rows, *shape)).astype("uint8")
        return x, random.integers(0, classes, rows).astype("uint8")

    for name, shape in SHAPES.items():
        module = getattr(keras.datasets, name)
        module.load_data = lambda shape=shape: (
            make(shape, ROWS),
            make(shape, ROWS // 2),
        )
    sys.modules["tensorflow_datasets"] = make_tfds(make)
    fit = keras.Model.fit

    def short_fit(self, *args, **kwargs):
        kwargs["epochs"] = min(kwargs.get("epochs", 1), 2)
        if kwargs.get("steps_per_epoch"):
            kwargs["steps_per_epoch"] = min(kwargs["steps_per_epoch"], 3)
        return fit(self, *args, **kwargs)

    keras.Model.fit = short_fit
    sys.path.insert(0, str(pathlib.Path(script).parent))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def make_tfds(make):
    """A module like tensorflow_datasets, whose datasets are random."""
    import tensorflow as tf

    def load(name, split=None, with_info=False, **_):
        size = 28 if "mnist" in name else 32
        shape = (size, size, 1 if "mnist" in name else 3)
        classes = 2 if "cats" in name else 10
        sets = {
            part: tf.data.Dataset.from_tensor_slices(make(shape, 64, classes))
            for part in ("train", "test", "validation")
        }
        found = sets if split is None else sets["train"]
        return (found, types.SimpleNamespace()) if with_info else found

    module = types.ModuleType("tensorflow_datasets")
    module.load = load
    module.disable_progress_bar = lambda: None
    module.Split = types.SimpleNamespace(TRAIN="train", TEST="test")
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        run_child(options.child)
        return
    print("| script | lines changed | left | run |\n|---|---|---|---|")
    for repository, path, is_run in read_list():
        if not (options.directory / repository / path).exists():
            continue
        script, changed, left = port(options.directory, repository, path)
        result = "-"
        if is_run and not left:
            status, line = run(script)
            result = "runs" if not status else f"fails: {line[:150]}"
        name = f"{repository.replace('+', '/')}/{path}"
        print(f"| {name} | {changed} | {len(left)} | {result} |", flush=True)
        for text in left:
            print(f"    {text}")


if __name__ == "__main__":
    main()

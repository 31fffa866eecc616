"""What commands print, at 80 and 120 columns.

    python -m tests.docs.screens.screens

records all screens anew, as files of this directory: read the difference before
you commit it. Numbers differ from run to run, and so do the widths of tables
with them: each number is recorded as 0, and each run of spaces or lines as one.
"""

import json
import os
import pathlib
import re
import sys
import tempfile

from tests.support import commands

DIRECTORY = pathlib.Path(__file__).parent
ROOT = DIRECTORY.parents[2]
WIDTHS = (80, 120)

# What is installed, and the name of the machine.
_OF_MACHINE = re.compile(r"optional |\S+: nothing to change")

# README's code, with a model and data.
README = """
import keras_strategies as ks  # before keras: selects its JAX backend
import keras
import numpy as np

x, y = np.random.rand(512, 8).astype("float32"), np.arange(512) % 3
strategy = ks.MirroredStrategy()
with strategy.scope():
    layers = keras.Input((8,)), keras.layers.Dense(3, "softmax")
    model = keras.Sequential(layers)
    loss = "sparse_categorical_crossentropy"
    model.compile("adam", loss, metrics=["accuracy"])
model.fit(x, y, batch_size=256, epochs=1, verbose=2)
"""
PLAN = """
import keras_strategies as ks
import jax
import keras


def make_model():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(64), dense(8)])
    model.compile("adam", "mse")
    return model


strategy = ks.MirroredStrategy()
shapes = [jax.ShapeDtypeStruct((32, n), "float32") for n in (64, 8)]
layouts = ["replicated", "sharded"]
options = {"progress": False}
plan = strategy.plan(make_model, tuple(shapes), strategies=layouts, **options)
print(plan)
"""
FIGURES = {
    "steps": 300,
    "startup_seconds": 4.2,
    "seconds": 20.0,
    "saves": 3,
    "compilations": {
        "count": 2,
        "seconds": 3.0,
        "causes": [{"cause": "the first step", "seconds": 2.0}],
    },
    "shares": {
        "input": 0.5,
        "program": 0.3,
        "python": 0.05,
        "callbacks": 0.05,
        "save": 0.05,
        "compile": 0.05,
        "evaluate": 0.0,
    },
    "step_ms": {"median": 20.0, "p95": 30.0},
    "rows_per_sec": 12_800.0,
    "advice": "50 % of the time waits for input.",
}


def _show_report(environ):
    from keras_strategies.reporting import document

    with tempfile.TemporaryDirectory() as directory:
        report = document.add_start(None, 1.7e9, 0)
        report = document.update_start(report, 300, FIGURES, is_done=True)
        path = pathlib.Path(directory) / "run"
        path.mkdir()
        (path / document.NAME).write_text(json.dumps(report))
        words = ("-m", "keras_strategies.cli", "report", "run")
        return _call(environ, *words, cwd=directory)


def _call(environ, *words, cwd=ROOT):
    return commands.call(sys.executable, *words, env=environ, cwd=cwd)


SCREENS = {
    "demo": lambda environ: _call(environ, "examples/digits_fit.py"),
    "readme": lambda environ: _call(environ, "-c", README),
    "doctor": lambda environ: _call(
        environ, "-m", "keras_strategies.cli", "doctor"
    ),
    "plan": lambda environ: _call(environ, "-c", PLAN),
    "report": _show_report,
}


def show(name, width):
    """A screen, as it is recorded."""
    kept = {k: os.environ[k] for k in ("HOME", "PATH") if k in os.environ}
    environ = kept | {"COLUMNS": str(width), "PYTHONPATH": str(ROOT)}
    environ["JAX_PLATFORMS"] = "cpu"
    if name != "readme":
        flag = "--xla_force_host_platform_device_count=4"
        environ["XLA_FLAGS"] = flag
    lines = SCREENS[name](environ).splitlines()
    lines = [line for line in lines if not _OF_MACHINE.match(line.strip())]
    return "".join(f"{normalize(line)}\n" for line in lines)


def normalize(line):
    """A line without what differs from run to run."""
    line = re.sub(r"\d[\d,.:]*(e[+-]\d+|dev\d+)?", "0", line)
    line = re.sub(r"(0 ?[-+] ?)+0", "0", line)
    line = re.sub(r"0[mu]?s/step", "0ms/step", line)
    line = re.sub(r"[─━]+", "─", line)
    return re.sub(r" +", " ", line).rstrip()


def path_of(name, width):
    """The file of a screen."""
    return DIRECTORY / f"{name}_{width}.txt"


def main():
    """Records all screens, or those that are named."""
    for name in sys.argv[1:] or SCREENS:
        for width in WIDTHS:
            path_of(name, width).write_text(show(name, width))


if __name__ == "__main__":
    main()

"""Collectives and bytes per chip of a train step, from the TPU compiler.

Compiles on a CPU machine, with libtpu, for a real TPU topology: no TPU is
needed. Compares this project's mapped step with the same step on plainly
sharded inputs, which is what `keras.distribution.DataParallel` runs.

    ./run bench tpu_collectives --model small --topology v5e:4x4
    ./run bench tpu_collectives --model resnet50 --topology v5e:16x16
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import argparse
import json
import re
import time

import jax
import keras
import numpy as np
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

import keras_strategies  # noqa: F401
from keras_strategies._core.batches import Segment
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.functions import make_program

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)


def small():
    """A small CNN with two BatchNormalizations."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


MODELS = {
    "small": (small, (32, 32, 3)),
    "resnet50": (
        lambda: keras.applications.ResNet50(weights=None),
        (224, 224, 3),
    ),
}


def build(name):
    """A compiled, built model and its picture shape."""
    make, shape = MODELS[name]
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = make()
    model.compile(
        keras.optimizers.Adam(1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    batch = np.zeros((2, *shape), "float32"), np.zeros((2,), "int32")
    model._symbolic_build(data_batch=batch)
    return model, shape


def abstract_state(model, sharding):
    """The state of a train step as shapes."""
    return tuple(
        [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)
            for v in group
        ]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )


def lowered(kind, model, mesh, shape, images):
    """Our program, or the plain one, lowered for the mesh."""
    rows = images * mesh.num_replicas
    data = (
        jax.ShapeDtypeStruct((rows, *shape), "float32", sharding=mesh.split),
        jax.ShapeDtypeStruct((rows,), "int32", sharding=mesh.split),
    )
    state = abstract_state(model, mesh.whole)
    if kind == "ours":
        segment = Segment(data=data, rows=rows, steps=1)
        return make_program(model, mesh).lower(state, segment)
    shardings = jax.tree.map(lambda _: mesh.whole, state)
    step = jax.jit(
        model.train_step, donate_argnums=0, out_shardings=(None, shardings)
    )
    return step.lower(state, data)


def measure(kind, model, mesh, shape, images):
    """Compiles one program; its collectives and bytes per chip."""
    start = time.perf_counter()
    compiled = lowered(kind, model, mesh, shape, images).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    counts = {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in KINDS}
    return {
        "collectives": counts,
        "argument_mb": memory.argument_size_in_bytes / 1e6,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "compile_seconds": time.perf_counter() - start,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--images", type=int, default=32, help="per chip")
    parser.add_argument(
        "--no-plain", action="store_true", help="only this project's step"
    )
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=options.topology
    )
    mesh = ReplicaMesh(devices=tuple(topology.devices))
    model, shape = build(options.model)
    kinds = ["ours"] if options.no_plain else ["ours", "plain"]
    table = Table(
        title=f"{options.model}, {options.images} images a chip, "
        f"{options.topology} ({mesh.num_replicas} chips)"
    )
    table.add_column("one train step")
    for kind in kinds:
        table.add_column(kind, justify="right")
    figures = {
        kind: measure(kind, model, mesh, shape, options.images)
        for kind in kinds
    }
    for name in KINDS:
        table.add_row(
            name, *(str(figures[k]["collectives"][name]) for k in kinds)
        )
    for name in ("argument_mb", "temporary_mb", "compile_seconds"):
        table.add_row(
            name.replace("_", " "), *(f"{figures[k][name]:.1f}" for k in kinds)
        )
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()

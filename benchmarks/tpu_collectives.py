"""Collectives and bytes per chip of steps, from the TPU compiler.

Compiles on a CPU machine, with libtpu, for a real TPU topology: no TPU is
needed. Compares this project's mapped step with the same step on plainly
sharded inputs, which is what `keras.distribution.DataParallel` runs.

    ./run bench tpu_collectives --model cnn --topology v5e:4x4
    ./run bench tpu_collectives --model resnet50 --topology v5e:16x16
    ./run bench tpu_collectives --model transformer --shape 2,2,1,1
    ./run bench tpu_collectives --docs      # the tables of docs/tpu.md
    ./run bench tpu_collectives --scale     # the table of 16 to 4096 chips
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import argparse
import json
import pathlib
import re
import resource
import subprocess
import sys
import time

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import keras_strategies as ks
from keras_strategies.spmd.compiled import measure_memory

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "tpu.md"
STEPS = ("train", "test", "predict", "run")
layers = keras.layers
Spec = jax.ShapeDtypeStruct


def mlp():
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu", name="one"),
            layers.Dropout(0.1),
            layers.Dense(1024, activation="relu", name="two"),
            layers.Dense(10, name="three"),
        ]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(32, 3, padding="same", name="one"),
            layers.BatchNormalization(name="norm_one"),
            layers.ReLU(),
            layers.Conv2D(64, 3, strides=2, padding="same", name="two"),
            layers.BatchNormalization(name="norm_two"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, name="three"),
        ]
    )


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 128, name="embedding")(inputs)
    y = layers.LayerNormalization(name="before_heads")(x)
    x = x + layers.MultiHeadAttention(4, 32, name="heads")(y, y)
    y = layers.LayerNormalization(name="before_dense")(x)
    y = layers.Dense(512, activation="gelu", name="up")(y)
    x = x + layers.Dense(128, name="down")(y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10, name="three")(x))


def resnet50():
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


# What makes the model, the rows it takes, and what a replica's cores divide:
# columns of one layer and rows of the next, so that they meet once in two.
MODELS = {
    "mlp": (
        mlp,
        Spec((784,), "float32"),
        {
            ".*one/kernel": (None, "model"),
            ".*one/bias": ("model",),
            ".*two/kernel": ("model", None),
        },
    ),
    "cnn": (
        cnn,
        Spec((16, 16, 3), "float32"),
        {
            ".*/one/kernel": (None, None, None, "model"),
            ".*/one/bias": ("model",),
            ".*/norm_one/.*": ("model",),
            ".*/two/kernel": (None, None, "model", None),
        },
    ),
    "transformer": (
        transformer,
        Spec((32,), "int32"),
        {
            ".*heads/(query|key|value)/kernel": (None, "model", None),
            ".*heads/(query|key|value)/bias": ("model", None),
            ".*heads/attention_output/kernel": ("model", None, None),
            ".*up/kernel": (None, "model"),
            ".*up/bias": ("model",),
            ".*down/kernel": ("model", None),
        },
    ),
    "resnet50": (resnet50, Spec((224, 224, 3), "float32"), {}),
}

ALL = ("mlp", "cnn", "transformer")
ONE = (1, 1, 1, 1)
# Name, a replica's cores, models. Slices of one host, then of several, then
# replicas of several cores.
SLICES = [
    ("v5e:2x2", ONE, ALL),
    ("tpu7x:2x2x1", ONE, ALL),
    ("v5p:2x2x1", ONE, ("mlp",)),
    ("v6e:2x2", ONE, ("mlp",)),
    ("v5e:4x4", ONE, ALL),
    ("v5e:16x16", ONE, ALL),
    ("v5p:8x8x16", ONE, ALL),
    ("v6e:4x4", ONE, ALL),
    ("v5e:4x4", (2, 1, 1, 1), ALL),
    ("v5e:4x4", (2, 2, 1, 1), ALL),
    ("tpu7x:2x2x1", (1, 1, 1, 2), ALL),
    ("tpu7x:2x2x1", (2, 1, 1, 2), ("mlp",)),
    ("v5e:16x16", (2, 2, 1, 1), ("mlp",)),
    ("v5p:8x8x16", (2, 1, 1, 1), ("mlp",)),
    ("v6e:4x4", (2, 2, 1, 1), ("mlp",)),
]


def build(strategy, name, policy="float32"):
    """A compiled model of the strategy, of that dtype policy."""
    before = keras.config.dtype_policy()
    # Here, for `clear_session` sets the policy back.
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model = MODELS[name][0]()
            model.compile(
                keras.optimizers.Adam(1e-3),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
    finally:
        keras.config.set_dtype_policy(before)
    check_dtype(model, policy)
    return model


def check_dtype(model, policy):
    """Raises unless the model and all its layers compute in the policy's."""
    wanted = keras.dtype_policies.get(policy).compute_dtype
    others = {
        layer.name: layer.compute_dtype
        for layer in (model, *model.layers)
        if layer.compute_dtype != wanted
    }
    if others:
        raise RuntimeError(
            f"The model must compute in {wanted}, as policy={policy!r} asks. "
            f"Received: {others}. Set the policy before the model is made, "
            "and after `clear_session`, which sets it back."
        )


def make_batch(strategy, name, rows_per_replica):
    rows = rows_per_replica * strategy.num_replicas_in_sync
    x = MODELS[name][1]
    return Spec((rows, *x.shape), x.dtype), Spec((rows,), "int32")


def loop_step(strategy, model):
    """A step as a loop of one's own has it."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )
    with strategy.scope():
        optimizer = keras.optimizers.Adam(1e-3)

    def step(batch):
        x, y = batch
        loss, grads = ks.value_and_grad(
            lambda: ks.compute_average_loss(
                loss_of(y, model(x, training=True))
            ),
            model.trainable_variables,
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return step


def compile_steps(
    topology, shape, name, steps=STEPS, rows=32, policy="float32", options=None
):
    """Compiles steps of a model with options; {kind: program}."""
    strategy = ks.TPUStrategy.for_topology(
        topology, computation_shape=shape, layout_map=MODELS[name][2]
    )
    keras.backend.clear_session()
    model = build(strategy, name, policy)
    batch = make_batch(strategy, name, rows)
    programs = {}
    for kind in steps:
        if kind == "run":
            step = loop_step(strategy, model)
            programs[kind] = strategy.compile_run(
                step, (batch,), compiler_options=options
            )
        else:
            programs[kind] = strategy.compile_step(
                model, batch, kind=kind, compiler_options=options
            )
    return programs


def compile_plain(topology, name, rows, policy="float32"):
    """The same train step on plainly sharded inputs."""
    strategy = ks.TPUStrategy.for_topology(topology)
    model = build(strategy, name, policy)
    batch = make_batch(strategy, name, rows)
    # Builds the metrics and the optimizer, too.
    strategy.compile_step(model, batch, kind="test")
    model.optimizer.build(model.trainable_variables)
    mesh = Mesh(np.array(strategy.extended.worker_devices), ("batch",))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("batch"))
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple(
        [Spec(v.shape, v.dtype, sharding=whole) for v in group]
        for group in groups
    )
    data = jax.tree.map(lambda a: Spec(a.shape, a.dtype, sharding=split), batch)
    shardings = jax.tree.map(lambda _: whole, state)
    step = jax.jit(
        model.train_step, donate_argnums=0, out_shardings=(None, shardings)
    )
    start = time.perf_counter()
    executable = step.lower(state, data).compile()
    return ks.CompiledProgram(
        name="plain train step",
        num_replicas=len(strategy.extended.worker_devices),
        cores_per_replica=1,
        trace_seconds=0.0,
        compile_seconds=time.perf_counter() - start,
        executable=executable,
        **measure_memory(executable),
    )


def facts(program):
    return {
        "collectives": program.collectives,
        "argument_mb": program.argument_bytes / 1e6,
        "output_mb": program.output_bytes / 1e6,
        "temporary_mb": program.temporary_bytes / 1e6,
        "mb_per_chip": program.bytes_per_chip / 1e6,
        "trace_seconds": program.trace_seconds,
        "compile_seconds": program.compile_seconds,
    }


def in_words(program):
    """Collectives and MB per chip for a cell of the document's table."""
    counts = program.collectives.items()
    words = [f"{n} {kind}" for kind, n in counts if n]
    return f"{', '.join(words) or 'none'}; {program.bytes_per_chip / 1e6:.1f}"


def table_of_slices():
    """The table of all slices and models, in Markdown."""
    lines = [
        "| slice | cores a replica | model | `fit` | `evaluate` | `predict` | "
        "`run` |",
        "|---|---|---|---|---|---|---|",
    ]
    for topology, shape, names in SLICES:
        for name in names:
            cells = map(in_words, compile_steps(topology, shape, name).values())
            cores = int(np.prod(shape))
            lines.append(
                f"| `{topology}` | {cores} | {name} | {' | '.join(cells)} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


SCALES = ("v5e:4x4", "v5e:16x16", "v5p:8x8x16", "v5p:16x16x16")


def scale(topology, name="mlp"):
    """Seconds to make a mesh, to trace and to compile a step; peak memory."""
    start = time.perf_counter()
    strategy = ks.TPUStrategy.for_topology(topology)
    made = time.perf_counter() - start
    model = build(strategy, name)
    program = strategy.compile_step(model, make_batch(strategy, name, 32))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "chips": program.num_replicas,
        "mesh_seconds": made,
        "trace_seconds": program.trace_seconds,
        "compile_seconds": program.compile_seconds,
        "peak_rss_mb": peak,
    }


def scale_alone(topology):
    """`scale` in a process of its own, after one on the least slice."""
    code = (
        "import json; from benchmarks.tpu_collectives import scale;"
        f"scale('v5e:2x2'); print(json.dumps(scale({topology!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=DOCUMENT.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table_of_scales():
    """The table of slices of 16 to 4096 chips, in Markdown."""
    lines = [
        "| slice | chips | mesh, s | tracing, s | compiling, s | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for topology in SCALES:
        row = scale_alone(topology)
        lines.append(
            f"| `{topology}` | {row['chips']} | {row['mesh_seconds']:.2f} "
            f"| {row['trace_seconds']:.2f} | {row['compile_seconds']:.1f} "
            f"| {row['peak_rss_mb']:.0f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def write_table(mark, table):
    """Replaces a table of the document, between its marks."""
    text = DOCUMENT.read_text()
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
    assert re.search(pattern, text, re.DOTALL), mark
    text = re.sub(
        pattern, lambda m: f"{m[1]}{table}\n{m[2]}", text, flags=re.DOTALL
    )
    DOCUMENT.write_text(text)


def print_table(options, programs):
    table = Table(
        title=f"{options.model}, {options.rows} rows a replica, "
        f"{options.topology}"
    )
    table.add_column("one train step")
    figures = {kind: facts(program) for kind, program in programs.items()}
    for kind in figures:
        table.add_column(kind, justify="right")
    for name in programs["train"].collectives:
        counts = [str(f["collectives"][name]) for f in figures.values()]
        table.add_row(name, *counts)
    for name in list(figures["train"])[1:]:
        table.add_row(
            name.replace("_", " "),
            *(f"{f[name]:.2f}" for f in figures.values()),
        )
    Console().print(table)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="cnn")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--rows", type=int, default=32, help="per replica")
    parser.add_argument(
        "--shape", default="1,1,1,1", help="a replica's cores: x,y,z,core"
    )
    parser.add_argument("--bfloat16", action="store_true", help="mixed")
    parser.add_argument(
        "--no-plain", action="store_true", help="only this project's step"
    )
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.docs:
        write_table("collectives", table_of_slices())
    if options.scale:
        write_table("scale", table_of_scales())
    if options.docs or options.scale:
        return
    policy = "mixed_bfloat16" if options.bfloat16 else "float32"
    shape = tuple(int(size) for size in options.shape.split(","))
    programs = compile_steps(
        options.topology, shape, options.model, ("train",), options.rows, policy
    )
    if not options.no_plain:
        programs["plain"] = compile_plain(
            options.topology, options.model, options.rows, policy
        )
    figures = print_table(options, programs)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()

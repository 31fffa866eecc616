"""The points that `./run bench sweep` measures: sweep_points.json.

A point is a model, its batches and the loop over them. Factors are varied one
at a time around three base models, and a seeded sample combines them. The
list was made before anything was mended for it, and stays as it is.

    python benchmarks/sweep/sweep_points.py    # writes the list anew, the same
"""

import json
import pathlib
import random

FILE = pathlib.Path(__file__).with_name("sweep_points.json")

# Base: width, rows a replica.
BASES = {"mlp": (64, 32), "cnn": (16, 32), "transformer": (64, 16)}
# Deep ones of the same families, with many small leaves.
STACKS = {
    "deep_mlp": (64, 32),
    "resnet": (16, 16),
    "deep_transformer": (64, 8),
}
FAMILY = {
    "deep_mlp": "mlp",
    "resnet": "cnn",
    "deep_transformer": "transformer",
} | {base: base for base in BASES}

WIDTHS = {
    "mlp": (32, 128, 256, 512, 1024, 2048),
    "cnn": (8, 32, 64, 128),
    "transformer": (32, 128, 256, 512),
}
ROWS = {
    "mlp": (1, 4, 8, 16, 64, 128, 256),
    "cnn": (1, 4, 8, 16, 64),
    "transformer": (1, 4, 8, 32, 64),
}
LAYERS = {
    "Dense": ("mlp",),
    "Conv1D": ("transformer",),
    "Conv2D": ("cnn",),
    "DepthwiseConv2D": ("cnn",),
    "LSTM": ("mlp", "transformer"),
    "GRU": ("mlp",),
    "Embedding": ("mlp", "transformer"),
    "MultiHeadAttention": ("mlp",),
    "BatchNormalization": tuple(BASES),
    "SyncBatchNormalization": tuple(BASES),
    "LayerNormalization": ("mlp", "cnn"),
    "Dropout": tuple(BASES),
}
OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW_EMA",
    "Lamb",
    "Adafactor",
    "Adam_accumulating",
)
LOOPS = ("fit", "evaluate", "predict", "run")
SAMPLE = 60
# Width x rows x devices of a sampled point at most, so that steps stay short.
MAX = {"mlp": 131072, "cnn": 4096, "transformer": 8192}

QUICK = (
    "mlp",
    "cnn",
    "transformer",
    "mlp-width-256",
    "cnn-width-32",
    "mlp-rows-4",
    "cnn-rows-8",
    "transformer-rows-4",
    "transformer-layer-Conv1D",
    "cnn-layer-DepthwiseConv2D",
    "mlp-layer-LSTM",
    "mlp-layer-GRU",
    "mlp-layer-Embedding",
    "mlp-layer-BatchNormalization",
    "cnn-layer-SyncBatchNormalization",
    "mlp-layer-LayerNormalization",
    "mlp-layer-Dropout",
    "mlp-optimizer-SGD",
    "mlp-optimizer-Lamb",
    "transformer-optimizer-AdamW_EMA",
    "mlp-optimizer-Adafactor",
    "mlp-optimizer-Adam_accumulating",
    "mlp-dtype-mixed_bfloat16",
    "mlp-spe-20",
    "transformer-spe-20",
    "mlp-loop-evaluate",
    "mlp-loop-predict",
    "mlp-loop-run",
    "mlp-extra-1",
    "mlp-devices-4",
)


def load():
    """The committed points, in their order."""
    return json.loads(FILE.read_text())


def batch_rows(point):
    """Rows of a whole batch, over all replicas."""
    return point["rows"] * point["devices"] + point["extra"]


def point(name, base, factor, **changes):
    width, rows = (BASES | STACKS)[base]
    return {
        "id": name,
        "factor": factor,
        "base": base,
        "width": width,
        "rows": rows,
        "devices": 2,
        "layer": None,
        "optimizer": "Adam",
        "dtype": "float32",
        "spe": 1,
        "loop": "fit",
        "extra": 0,
        "processes": 1,
    } | changes


def varied(base, factor, value, **more):
    """One factor changed; further changes are told in the id."""
    words = [base, factor, str(value)]
    words += [f"{key}-{more[key]}" for key in more]
    return point("-".join(words), base, factor, **{factor: value}, **more)


def one_at_a_time():
    for base in BASES:
        yield point(base, base, "base")
    for base in BASES:
        for factor, values in {
            "width": WIDTHS[base],
            "rows": ROWS[base],
            "optimizer": [o for o in OPTIMIZERS if o != "Adam"],
            "dtype": ["mixed_bfloat16"],
            "spe": [20],
            "loop": LOOPS[1:],
            "extra": [1],
            "devices": [1, 4, 8],
            "processes": [2],
        }.items():
            for value in values:
                # Half a second a step otherwise.
                is_long = base == "transformer" and value == 512
                more = {"rows": 4} if is_long else {}
                yield varied(base, factor, value, **more)
    for layer, bases in LAYERS.items():
        for base in bases:
            yield varied(base, "layer", layer)


def pairs():
    """Two factors at once, where one is suspected."""
    for width in (256, 512):
        for rows in (4, 8, 16):
            yield varied("mlp", "width", width, rows=rows)
        yield varied("mlp", "spe", 20, width=width)
    yield varied("cnn", "spe", 20, layer="BatchNormalization")
    yield varied("mlp", "spe", 20, loop="evaluate")
    yield varied("mlp", "spe", 20, loop="predict")
    yield varied("mlp", "extra", 1, rows=4)
    yield varied("mlp", "extra", -1, devices=4)
    for more in ({"loop": "evaluate"}, {"loop": "run"}, {"spe": 20}):
        yield varied("mlp", "extra", 1, **more)
    yield varied("mlp", "devices", 4, width=256, rows=8)
    yield varied("mlp", "devices", 4, spe=20)
    # Three million weights.
    yield varied("mlp", "processes", 2, width=1200)
    yield varied("mlp", "processes", 2, loop="run")


def stacks():
    for base in STACKS:
        yield point(base, base, "stack")
        yield point(f"{base}-spe-20", base, "stack", spe=20)
    yield point("deep_mlp-width-256", "deep_mlp", "stack", width=256)
    yield point("deep_mlp-run", "deep_mlp", "stack", loop="run")
    yield point("resnet-width-32", "resnet", "stack", width=32)
    yield point(
        "deep_transformer-width-128",
        "deep_transformer",
        "stack",
        width=128,
    )


def sampled(seed=18):
    draw = random.Random(seed)
    for index in range(SAMPLE):
        base = draw.choice(list(BASES))
        devices = draw.choices((2, 4, 8, 1), (10, 2, 1, 1))[0]
        width = draw.choice((BASES[base][0], *WIDTHS[base]))
        rows = draw.choice((BASES[base][1], *ROWS[base]))
        while width * rows * devices > MAX[base] and rows > 1:
            rows //= 2
        loop = draw.choices(LOOPS, (12, 2, 2, 4))[0]
        is_ragged = draw.random() < 0.15 and devices > 1
        yield point(
            f"sample-{index:02}",
            base,
            "sample",
            width=width,
            rows=rows,
            devices=devices,
            layer=draw.choice((None, *LAYERS)),
            optimizer=draw.choice(OPTIMIZERS),
            dtype=draw.choices(("float32", "mixed_bfloat16"), (3, 1))[0],
            spe=1 if loop == "run" else draw.choices((1, 20), (3, 1))[0],
            loop=loop,
            extra=1 if is_ragged else 0,
        )


def all_points():
    points = [*one_at_a_time(), *pairs(), *stacks(), *sampled()]
    taken = 0
    for one in points:
        one["quick"] = one["id"] in QUICK
        is_plain = one["loop"] == "fit" and one["spe"] == 1
        is_plain &= one["processes"] == 1 and not one["extra"]
        taken += is_plain
        # tf.distribute takes part in every tenth.
        one["tf"] = is_plain and taken % 6 == 1
    return points


def main():
    points = all_points()
    ids = [one["id"] for one in points]
    if len(set(ids)) < len(ids) or not set(QUICK) <= set(ids):
        raise ValueError("ids must be unique, and hold the quick ones.")
    lines = ",\n".join(json.dumps(one) for one in points)
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

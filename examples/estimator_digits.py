"""Trains an Estimator on handwritten digits, on all devices of this machine.

`train_and_evaluate` trains, evaluates each checkpoint and exports the best
model. With one CPU device only, four virtual ones are used. Asserts that the
best model's test accuracy is at least 0.95, and that a second run goes on
where the first one has ended.

    python examples/estimator_digits.py
    keras-strategies launch --processes 2 --evaluator \\
        examples/estimator_digits.py --model-dir digits
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--devices", type=int, help="how many to use; all by default"
    )
    parser.add_argument(
        "--model-dir", help="where to go on; a temporary directory by default"
    )
    parser.add_argument("--max-steps", type=int, default=400)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices or 4}",
    )
    return options


OPTIONS = parse()

import tempfile

import jax
import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import keras_strategies as ks

IS_CLUSTER = "TF_CONFIG" in os.environ
ModeKeys = ks.estimator.ModeKeys


def load():
    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype("float32")
    y = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


TRAIN_DATA, TEST_DATA = load()


def train_input_fn(params):
    """Shuffled batches of (features, labels), without an end."""
    x, y = TRAIN_DATA
    rng = np.random.default_rng(1)
    size = params["batch_size"]
    while True:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - size + 1, size):
            rows = order[start : start + size]
            yield {"image": x[rows]}, y[rows]


def eval_input_fn():
    x, y = TEST_DATA
    return {"image": x}, y


def model_fn(features, labels, mode, params):
    layers = keras.layers
    outputs = features["image"]
    for filters, strides in ((16, 1), (32, 2)):
        outputs = layers.Conv2D(
            filters, 3, strides=strides, padding="same", use_bias=False
        )(outputs)
        outputs = layers.BatchNormalization(momentum=0.9)(outputs)
        outputs = layers.ReLU()(outputs)
    outputs = layers.Dropout(0.25)(layers.Flatten()(outputs))
    model = keras.Model(features, layers.Dense(10)(outputs))
    return ks.estimator.EstimatorSpec(
        mode,
        model=model,
        predictions={
            "class": lambda logits: logits.argmax(-1),
            "logits": None,
        },
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        train_op=keras.optimizers.Adam(params["learning_rate"]),
        eval_metric_ops={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


def is_more_accurate(best_eval_result, current_eval_result):
    return current_eval_result["accuracy"] > best_eval_result["accuracy"]


def make_estimator(model_dir):
    if IS_CLUSTER:
        strategy = ks.MultiWorkerMirroredStrategy()
    else:
        strategy = ks.MirroredStrategy(jax.local_devices()[: OPTIONS.devices])
    return ks.estimator.Estimator(
        model_fn,
        config=ks.estimator.RunConfig(
            model_dir,
            tf_random_seed=1,
            save_checkpoints_steps=100,
            save_summary_steps=50,
            train_distribute=strategy,
        ),
        params={"batch_size": 64, "learning_rate": 1e-3},
    )


def run(estimator, max_steps):
    return ks.estimator.train_and_evaluate(
        estimator,
        ks.estimator.TrainSpec(train_input_fn, max_steps=max_steps),
        ks.estimator.EvalSpec(
            eval_input_fn,
            steps=None,
            exporters=ks.estimator.BestExporter(
                compare_fn=is_more_accurate, saved_model=False
            ),
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )


def best_accuracy(estimator):
    """Of the exported model, which needs nothing but Keras."""
    directory = os.path.join(estimator.model_dir, "export", "best_exporter")
    newest = max(os.listdir(directory), key=int)
    path = os.path.join(directory, newest, "model.keras")
    model = keras.saving.load_model(path)
    x, y = TEST_DATA
    logits = model.predict({"image": x}, verbose=0)
    return path, float((logits.argmax(-1) == y).mean())


def show(estimator, metrics, began_at):
    path, accuracy = best_accuracy(estimator)
    table = Table(title="Digits with an Estimator", show_header=False)
    table.add_row("task", estimator.config.task_type)
    table.add_row("went on from step", str(began_at))
    table.add_row("global step", str(metrics["global_step"]))
    table.add_row("last test accuracy", f"{metrics['accuracy']:.3f}")
    table.add_row("exported model's", f"{accuracy:.3f}")
    table.add_row("export", path)
    Console().print(table)
    assert accuracy >= 0.95, f"test accuracy {accuracy:.3f} is below 0.95"


def main():
    model_dir = OPTIONS.model_dir or tempfile.mkdtemp(prefix="digits-")
    estimator = make_estimator(model_dir)
    if IS_CLUSTER:
        metrics, _ = run(estimator, OPTIONS.max_steps)
        if metrics is not None:  # In the evaluator.
            show(estimator, metrics, "-")
        return
    half = OPTIONS.max_steps // 2
    run(estimator, half)
    # Another process would do the same.
    estimator = make_estimator(model_dir)
    began_at = estimator.get_variable_value("global_step")
    assert began_at >= half, f"the second run begins at step {began_at}"
    metrics, _ = run(estimator, OPTIONS.max_steps)
    show(estimator, metrics, began_at)
    assert metrics["global_step"] >= OPTIONS.max_steps
    labels = [row["class"] for row in estimator.predict(eval_input_fn)]
    accuracy = float((np.array(labels) == TEST_DATA[1]).mean())
    assert abs(accuracy - metrics["accuracy"]) < 1e-6
    Console().print("The second run went on where the first one had ended.")


if __name__ == "__main__":
    main()

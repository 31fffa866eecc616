"""Small models and data for the tests of Estimators."""

import keras
import numpy as np

import keras_strategies as ks

ROWS = 22


def data(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


X, Y = data()


def arrays():
    return {"a": X}, Y


def batches_of(x, y, size=8, repeat=False):
    while True:
        for start in range(0, len(x), size):
            yield {"a": x[start : start + size]}, y[start : start + size]
        if not repeat:
            return


def batches():
    """22 rows in batches of 8: the last one is of 6."""
    return batches_of(X, Y)


def infinite():
    return batches_of(X, Y, repeat=True)


def plain(features, labels, mode, params):
    """A functional model of the features, compiled."""
    del labels, mode
    seeds = keras.initializers.GlorotUniform(3)
    hidden = keras.layers.Dense(
        params.get("units", 4), "tanh", kernel_initializer=seeds
    )
    outputs = keras.layers.Dense(1, kernel_initializer=seeds)
    model = keras.Model(features, outputs(hidden(features["a"])))
    model.compile(
        keras.optimizers.Adam(params.get("rate", 0.05)),
        "mse",
        metrics=params.get("metrics", ["mae"]),
    )
    return model


def with_spec(features, labels, mode, params, config):
    """The same model, in an EstimatorSpec."""
    del labels, config
    outputs = keras.layers.Dense(2)(features["a"])
    model = keras.Model(features, outputs)
    return ks.estimator.EstimatorSpec(
        mode,
        model=model,
        predictions=params.get(
            "predictions", {"sum": lambda y: y.sum(-1), "both": None}
        ),
        loss="mse",
        train_op="sgd",
        eval_metric_ops={
            "mean_error": keras.metrics.MeanAbsoluteError(),
            "own": lambda y, p: keras.ops.mean(y - p, -1),
            "mae": "mae",
        },
        training_hooks=params.get("training_hooks"),
        training_chief_hooks=params.get("training_chief_hooks"),
        evaluation_hooks=params.get("evaluation_hooks"),
        prediction_hooks=params.get("prediction_hooks"),
    )


class Unbuilt(keras.Model):
    """A model without known inputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["a"])


def config_of(directory, **fields):
    """A RunConfig that saves at the end of trainings, and logs nothing."""
    fields = {
        "save_checkpoints_secs": None,
        "save_summary_steps": None,
        "log_step_count_steps": None,
        "tf_random_seed": 1,
    } | fields
    if "save_checkpoints_steps" in fields:
        fields.pop("save_checkpoints_secs")
    return ks.estimator.RunConfig(str(directory), **fields)


def estimator_of(directory, model_fn=plain, params=None, warm=None, **fields):
    return ks.estimator.Estimator(
        model_fn,
        config=config_of(directory, **fields),
        params={} if params is None else params,
        warm_start_from=warm,
    )


def weights_of(estimator):
    """The weights of the newest checkpoint, by name."""
    names = [
        name
        for name in estimator.get_variable_names()
        if name.endswith(("kernel", "bias")) and "/" in name
    ]
    return {
        name: estimator.get_variable_value(name)
        for name in names
        if not name.startswith("optimizer")
    }


def assert_equal_weights(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(
            one[name], other[name], rtol=0, atol=tolerance, err_msg=name
        )

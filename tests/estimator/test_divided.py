"""An Estimator whose training divides variables: one device's numbers."""

import os

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.estimator import models

EXACT = 2e-6


def dividing(kind=ks.experimental.FullySharded, count=4):
    return ks.MirroredStrategy(
        jax.devices()[:count], variable_partitioner=kind(min_size=1)
    )


def noting(made, features, labels, mode, params):
    """The plain model, noted with its mode."""
    model = models.plain(features, labels, mode, params)
    made.append((mode, model))
    return model


def noted(directory, **fields):
    """An Estimator, and the models that it makes, with their modes."""
    made = []

    def model_fn(features, labels, mode, params):
        return noting(made, features, labels, mode, params)

    params = {"units": 8}
    return models.estimator_of(
        directory, model_fn, params=params, **fields
    ), made


def is_divided(model):
    return not model.weights[0].value.sharding.is_fully_replicated


def slots_are_divided(model):
    slots = [v for v in model.optimizer.variables if v.shape]
    return [not v.value.sharding.is_fully_replicated for v in slots]


def as_numbers(metrics):
    return {k: float(v) for k, v in metrics.items()}


def predicted(estimator):
    return np.stack(list(estimator.predict(models.arrays)))


@pytest.mark.parametrize(
    "evaluates",
    [
        "mirrored",
        pytest.param("divided", marks=pytest.mark.slow),
        pytest.param("alone", marks=pytest.mark.slow),
    ],
)
def test_trained_evaluated_predicted_and_resumed(tmp_path, evaluates):
    alone, _ = noted(tmp_path / "alone")
    given = {"divided": dividing(), "alone": None}.get(
        evaluates, ks.MirroredStrategy(jax.devices()[:2])
    )
    fields = {"train_distribute": dividing(), "eval_distribute": given}
    ours, made = noted(tmp_path / "ours", **fields)
    for estimator in (alone, ours):
        estimator.train(models.infinite, max_steps=4)
    # Another Estimator resumes from the checkpoint of the first.
    ours, resumed = noted(tmp_path / "ours", **fields)
    for estimator in (alone, ours):
        estimator.train(models.infinite, max_steps=7)
    for _, model in [*made, *resumed]:
        assert is_divided(model)
        assert sum(slots_are_divided(model)) >= 6
    models.assert_equal_weights(
        models.weights_of(ours), models.weights_of(alone), EXACT
    )
    assert int(ours.get_variable_value("global_step")) == 7
    assert as_numbers(ours.evaluate(models.arrays)) == pytest.approx(
        as_numbers(alone.evaluate(models.arrays)), rel=1e-5
    )
    np.testing.assert_allclose(predicted(ours), predicted(alone), atol=1e-5)
    others = [m for mode, m in resumed if mode != ks.estimator.ModeKeys.TRAIN]
    assert len(others) >= 2
    is_own = evaluates == "divided"
    assert all(is_divided(model) == is_own for model in others)


@pytest.mark.slow
def test_exported_and_warm_started(tmp_path):
    source, _ = noted(tmp_path / "source", train_distribute=dividing())
    source.train(models.infinite, max_steps=3)
    wanted = predicted(source)
    path = source.export_saved_model(tmp_path / "export", saved_model=False)
    loaded = keras.saving.load_model(
        os.path.join(os.fsdecode(path), "model.keras")
    )
    np.testing.assert_allclose(
        loaded.predict({"a": models.X}, verbose=0), wanted, atol=1e-6
    )
    targets = []
    for name, strategy in (
        ("alone", None),
        ("ours", dividing(ks.experimental.SlotsOnly, 2)),
        ("eight", dividing(count=8)),
    ):
        target, made = noted(
            tmp_path / name, train_distribute=strategy, warm=source.model_dir
        )
        target.train(models.infinite, max_steps=2)
        targets.append(models.weights_of(target))
        if name == "eight":
            assert is_divided(made[0][1])
        if name == "ours":
            assert not is_divided(made[0][1])
            assert any(slots_are_divided(made[0][1]))
    for other in targets[1:]:
        models.assert_equal_weights(other, targets[0], EXACT)

"""An Estimator on two processes that train and evaluate together."""

import numpy as np
import pytest

from tests.estimator import models
from tests.support.jobs import values_of

pytestmark = pytest.mark.slow


def work(directory):
    """Runs in each process."""
    import jax

    import keras_strategies as ks
    from tests.estimator.test_train_and_evaluate import Notes, run

    strategy = ks.MultiWorkerMirroredStrategy()
    estimator = models.estimator_of(
        directory,
        save_checkpoints_steps=2,
        train_distribute=strategy,
        eval_distribute=strategy,
    )
    listener: list[int] = []

    class Listens(ks.estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            listener.append(global_step_value)
            return global_step_value == 8

    exporter = Notes()
    metrics, exports = run(
        estimator, max_steps=5, exporters=exporter, listeners=[Listens()]
    )
    hook = ks.estimator.experimental.stop_if_lower_hook(
        estimator, "loss", 1e9, run_every_secs=None, run_every_steps=2
    )
    estimator.train(models.infinite, steps=9, hooks=[hook])
    stopped = int(estimator.get_variable_value("global_step"))
    estimator.train(models.infinite, max_steps=20, saving_listeners=[Listens()])
    with_context = []

    def input_fn(input_context):
        with_context.append(input_context.input_pipeline_id)
        return models.batches_of(models.X[:8], models.Y[:8], size=2)

    before = int(estimator.get_variable_value("global_step"))
    estimator.train(input_fn)
    return {
        "metrics": metrics,
        "exports": exports,
        "calls": exporter.calls,
        "listener": listener,
        "stopped": stopped,
        "ended": before,
        "context": with_context,
        "last": int(estimator.get_variable_value("global_step")),
        "predictions": np.stack(
            list(estimator.predict(models.arrays))
        ).tolist(),
        "alone": models.estimator_of(directory).evaluate(models.arrays),
        "process": jax.process_index(),
    }


def test_processes_train_evaluate_and_predict_together(tmp_path):
    alone = models.estimator_of(tmp_path / "alone", save_checkpoints_steps=2)
    alone.train(models.infinite, max_steps=5)
    expected = alone.evaluate(models.arrays)
    target = "estimator.test_processes:work"
    first, second = values_of(target, 2, tmp_path / "run", devices=1)
    for told in (first, second):
        assert told["metrics"] == pytest.approx(expected, rel=1e-5)
        assert told["stopped"] == 6
        assert told["ended"] == 8
        assert told["last"] == 12
    assert first["calls"] == [[2, False], [4, False], [5, True]]
    assert first["exports"] == ["notes-5"]
    assert second["calls"] == second["exports"] == []
    assert first["listener"] == [2, 4, 5, 8]
    assert second["listener"] == []
    assert (first["context"], second["context"]) == ([0], [1])
    assert first["predictions"] == second["predictions"]
    assert first["alone"] == second["alone"]
    assert first["alone"]["global_step"] == 12

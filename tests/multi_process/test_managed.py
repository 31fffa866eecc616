"""Checkpoints of loops of one's own on several processes."""

from keras_strategies.testing import run_processes


def test_variables_made_outside_of_the_scope_are_saved(tmp_path):
    results = run_processes(
        "tests.multi_process.managed:save_and_restore",
        2,
        args=(str(tmp_path / "run"),),
        devices_per_process=1,
        timeout_s=120,
    )
    for result in results:
        # The chief's values, in both.
        assert result.value == {
            "step": 2,
            "epoch": 13,
            "factor": [0.0, 1.0, 2.0],
            "is_same": True,
            "is_local": True,
        }

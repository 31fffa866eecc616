"""Checkpoints of loops of one's own on several processes."""

from tests.support.jobs import values_of


def test_variables_made_outside_of_the_scope_are_saved(tmp_path):
    target = "multi_process.managed:save_and_restore"
    for value in values_of(target, 2, tmp_path / "run", devices=1):
        # The chief's values, in both.
        assert value == {
            "step": 2,
            "epoch": 13,
            "factor": [0.0, 1.0, 2.0],
            "is_same": True,
            "is_local": True,
        }

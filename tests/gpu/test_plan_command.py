"""`keras-strategies plan --topology h100:2`."""

import json
import os
import subprocess
import sys

import pytest

from tests.planning.capture.scripts import MIRRORED

pytestmark = pytest.mark.gpu


def test_a_script_is_planned_for_gpus_that_are_not_there(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MIRRORED + "model.fit(x, y)\n")
    words = [sys.executable, "-m", "keras_strategies.cli", "plan", "--json"]
    words += ["--topology", "h100:2", "--layout", "replicated"]
    # A plan uses no device, whatever JAX is told.
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    ended = subprocess.run(
        [*words, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    (step,) = plan["steps"]
    assert (step["topology"], step["num_replicas"]) == ("h100:2", 2)
    assert step["memory"]["weights"] == 4 * (40 * 30 + 30)
    assert step["counts"] == {"all-reduce": 1}
    assert step["fits"]
    assert step["estimate"]["seconds"] > 0
    assert "cuDNN" in plan["notes"][1]

"""The file of a report, over the starts of a run."""

import json
import os
import signal
import subprocess
import sys

import pytest

from keras_strategies.cli.main import main
from keras_strategies.reporting import document as files

SCRIPT = """
import os, signal, sys
import keras_strategies as ks
import keras
import numpy as np

class Kill(keras.callbacks.Callback):
    count = 0
    def on_train_batch_end(self, batch, logs=None):
        Kill.count += 1
        if Kill.count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

with ks.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((40, 3), "float32")
model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=[
    ks.callbacks.Checkpoint(sys.argv[1], save_every_steps=7),
    Kill(),
    ks.callbacks.RunReport(),
])
"""


def run(directory, kill_at):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), str(kill_at)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_starts_of_a_run_that_was_killed_twice(tmp_path, capsys):
    assert run(tmp_path, 17).returncode == -signal.SIGKILL
    # The last save that is complete is that of step 7 or 14.
    assert run(tmp_path, 5).returncode == -signal.SIGKILL
    ended = run(tmp_path, 1000)
    assert ended.returncode == 0, ended.stderr
    report = files.load_report(tmp_path)
    starts = report["starts"]
    first = [start["first_step"] for start in starts]
    last = [start["last_step"] for start in starts]
    assert first[0] == 0
    assert {first[1], first[2]} <= {0, 7, 14, 21}
    assert last[2] == report["num_steps"] == 40
    repeated = max(last[0] - first[1], 0) + max(last[1] - first[2], 0)
    assert report["num_repeated"] == repeated
    assert files.compute_goodput(report) == 40 / (40 + repeated)
    assert [start["is_done"] for start in starts] == [False, False, True]
    assert "restarts 2" in " ".join(ended.stdout.split())
    # Several runs side by side, and as JSON.
    assert (
        main(["report", str(tmp_path), f"{tmp_path}/../{tmp_path.name}"]) == 0
    )
    assert capsys.readouterr().out.count(tmp_path.name) >= 2
    assert main(["report", "--json", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out).values()
    assert printed["starts"] == starts


def test_the_file_keeps_the_latest_starts_only(tmp_path):
    report = None
    for number in range(250):
        report = files.add_start(report, 1.5, 3 * number)
        report = files.update_start(
            report, 3 * number + 5, files.EMPTY, is_done=False
        )
    files.save_report(tmp_path, report)
    assert files.load_report(tmp_path) == report
    assert len(report["starts"]) == files.MAX_STARTS
    assert report["num_starts"] == 250
    assert report["num_repeated"] == 2 * 249
    assert os.listdir(tmp_path) == [files.NAME]


def test_steps_before_the_first_start_are_no_part_of_goodput():
    report = files.add_start(None, 0.0, 100)
    report = files.update_start(report, 115, files.EMPTY, is_done=False)
    report = files.add_start(report, 1.0, 105)
    report = files.update_start(report, 130, files.EMPTY, is_done=True)
    assert report["num_repeated"] == 10
    assert files.compute_goodput(report) == 30 / 40


def good():
    report = files.add_start(None, 1.5, 3)
    return files.update_start(report, 5, files.EMPTY, is_done=False)


def changed(**figures):
    return files.update_start(good(), 5, files.EMPTY | figures, is_done=False)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "{}",
        json.dumps(good() | {"num_steps": "5"}),
        json.dumps(good() | {"starts": []}),
        json.dumps(good() | {"starts": [{}]}),
        json.dumps(changed(shares={"input": "1"})),
        json.dumps(changed(shares=[])),
        json.dumps(changed(rows_per_sec=10**400)),
        json.dumps(changed(step_ms={"median": 1})),
        json.dumps(changed(advice=3)),
        json.dumps(good() | {"num_starts": None}),
        json.dumps(good()).replace("1.5", "NaN"),
        "[" * 100_000,
        " " * (5 << 20),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text):
    (tmp_path / files.NAME).write_text(text)
    with pytest.raises(files.ReportError, match="must be a report"):
        files.load_report(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("keras-strategies report: ")
    assert output.err.count("\n") == 1


def test_a_directory_without_a_report_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "missing")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("without one" in line for line in lines)


def test_control_characters_of_a_file_are_escaped(tmp_path, capsys):
    figures = {"advice": "\x1b[2J", "shares": {}}
    files.save_report(tmp_path, changed(**figures))
    assert main(["report", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out

"""The file of a report, over the starts of a run."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import keras_strategies as ks
from keras_strategies.cli.main import main
from keras_strategies.reporting import document as files
from keras_strategies.reporting.document import (
    STEP_NAME,
    StepFile,
    read_step,
)

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
def test_goodput_of_a_run_that_was_killed_twice(tmp_path, capsys):
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
    assert last == [17, first[1] + 5, 40]
    repeated = 17 - first[1] + first[1] + 5 - first[2]
    assert report["num_repeated"] == repeated > 0
    assert files.compute_goodput(report) == 40 / (40 + repeated)
    assert [start["is_done"] for start in starts] == [False, False, True]
    lines = " ".join(ended.stdout.split())
    assert "restarts 2" in lines
    goodput = f"{repeated} (goodput {100 * 40 / (40 + repeated):.1f} %)"
    assert f"steps computed twice {goodput}" in lines
    # Several runs side by side, and as JSON.
    assert (
        main(["report", str(tmp_path), f"{tmp_path}/../{tmp_path.name}"]) == 0
    )
    assert capsys.readouterr().out.count(goodput.split()[0]) >= 2
    assert main(["report", "--json", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out).values()
    assert printed["goodput"] == 40 / (40 + repeated)
    assert printed["starts"] == starts


def test_the_file_keeps_the_latest_starts_only(tmp_path):
    report = None
    for number in range(250):
        report = files.add_start(report, 1.5, 3 * number, None)
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
    report = files.add_start(None, 0.0, 100, None)
    assert files.compute_goodput(report) is None
    report = files.update_start(report, 110, files.EMPTY, is_done=False)
    # The process had reached step 115 when it was killed.
    report = files.add_start(report, 1.0, 105, 115)
    report = files.update_start(report, 130, files.EMPTY, is_done=True)
    assert report["num_repeated"] == 10
    assert files.compute_goodput(report) == 30 / 40


def good():
    report = files.add_start(None, 1.5, 3, None)
    return files.update_start(report, 5, files.EMPTY, is_done=False)


def changed(**figures):
    return files.update_start(good(), 5, files.EMPTY | figures, is_done=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "it has another structure"),
        ("{", "line 1"),
        ("{}", "starts"),
        (json.dumps(good() | {"num_steps": "5"}), "structure"),
        (json.dumps(good() | {"starts": []}), "it has another structure"),
        (json.dumps(good() | {"starts": [{}]}), "figures"),
        (json.dumps(changed(shares={"input": "1"})), "format code"),
        (json.dumps(changed(shares=[])), "has no attribute"),
        (json.dumps(changed(rows_per_sec=10**400)), "too large"),
        (json.dumps(changed(step_ms={"median": 1})), "p95"),
        (json.dumps(changed(advice=3)), "another structure"),
        (json.dumps(good() | {"num_starts": None}), "another structure"),
        (json.dumps(good()).replace("1.5", "NaN"), "NaN"),
        ("[" * 100_000, ""),
        (" " * (5 << 20), "characters"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text, problem):
    (tmp_path / files.NAME).write_text(text)
    with pytest.raises(files.ReportError, match="must be a report") as raised:
        files.load_report(tmp_path)
    assert problem in str(raised.value)
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


def test_the_last_step_outlives_its_process(tmp_path):
    assert read_step(tmp_path, 1) is None
    file = StepFile(tmp_path, 1, 0)
    file.write(123)
    assert read_step(tmp_path, 1) == 123
    assert read_step(tmp_path, 2) is None
    # A later start replaces the file.
    later = StepFile(tmp_path, 2, 100)
    file.write(124)
    file.close()
    later.close()
    assert read_step(tmp_path, 1) is None
    assert read_step(tmp_path, 2) == 100


def test_control_characters_of_a_file_are_escaped(tmp_path, capsys):
    figures = {"advice": "\x1b[2J", "shares": {}}
    files.save_report(tmp_path, changed(**figures))
    assert main(["report", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


class Copies:
    """Copies of a directory, as processes killed in writes leave it."""

    def __init__(self, directory, copies, monkeypatch):
        self.directory, self.copies, self.names = directory, copies, []
        monkeypatch.setattr(files.os, "replace", self.around(os.replace))
        monkeypatch.setattr(StepFile, "write", self.around(StepFile.write))

    def around(self, write):
        def write_between_copies(*args):
            self.copy()
            write(*args)
            self.copy()

        return write_between_copies

    def copy(self):
        name = str(len(self.names))
        shutil.copytree(self.directory, self.copies / name)
        self.names.append(name)


def test_starts_killed_while_they_write_count_each_step_once(
    tmp_path, monkeypatch
):
    with ks.callbacks.RunReport(tmp_path / "run", verbose=False) as report:
        for _ in range(13):
            with report.step():
                pass
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    report = ks.callbacks.RunReport(tmp_path / "killed", verbose=False)
    with monkeypatch.context() as patch:
        copies = Copies(tmp_path / "killed", tmp_path, patch)
        # Steps 8 to 13 are computed again.
        report.begin(7)
    report.close()
    assert len(copies.names) == 4
    for name in copies.names:
        again = ks.callbacks.RunReport(tmp_path / name, verbose=False)
        again.begin(7)
        again.close()
        found = files.load_report(tmp_path / name)
        assert found["num_repeated"] == 6, name
        assert set(os.listdir(tmp_path / name)) == {files.NAME, STEP_NAME}


PROBLEMS = """
import errno, os, pathlib, resource, sys
from keras_strategies.reporting.document import STEP_NAME, StepFile, read_step

directory, problem = sys.argv[1:]
path = os.path.join(directory, STEP_NAME)
if problem == "full":
    # As on a full disk, no byte can be added to a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
if problem == "directory":
    os.mkdir(path)
if problem == "pipe":
    os.mkfifo(path)
if problem == "read-only":
    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")
    pathlib.Path.open = fail
file = StepFile(directory, 5, 0)
file.write(1)
if problem == "cut":
    os.truncate(path, 0)
    assert read_step(directory, 5) is None
file.write(2)
if problem == "broken disk":
    os.close(file._file.fileno())
    file.write(3)
print(read_step(directory, 5))
file.close()
"""


@pytest.mark.parametrize(
    ("problem", "last_step"),
    [
        ("cut", 2),
        ("full", None),
        ("directory", None),
        ("pipe", 2),
        ("read-only", None),
        ("broken disk", 2),
    ],
)
def test_a_problem_of_the_last_steps_file_costs_the_step_only(
    tmp_path, problem, last_step
):
    # In a process of its own, which a problem might kill.
    ended = subprocess.run(
        [sys.executable, "-c", PROBLEMS, str(tmp_path), problem],
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, f"{last_step}\n"), ended


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_last_step_overwrites_no_file_that_has_another_name(tmp_path, link):
    letter = tmp_path / "letter"
    letter.write_text("a letter of 24 characters")
    link(letter, tmp_path / STEP_NAME)
    assert read_step(tmp_path, 5) is None
    file = StepFile(tmp_path, 5, 0)
    file.write(1)
    file.close()
    assert letter.read_text() == "a letter of 24 characters"
    assert read_step(tmp_path, 5) == 1

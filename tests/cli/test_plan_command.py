"""`keras-strategies plan` and its arguments."""

import json
import os
import signal
import subprocess
import sys

import pytest
from jax.experimental import topologies

from keras_strategies.cli import plan_command as command
from keras_strategies.cli.main import main
from keras_strategies.planning.capture.request import ENVIRONMENT
from tests.planning.capture.scripts import HEAD, MIRRORED
from tests.support import strangers

ANY = ("--topology", "v5e:4x4", "-m", "train")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "v5e:4x4"], "Received: none. Pass exactly one"),
        ([*ANY, "train.py"], "Received: train.py, train. Pass exactly one"),
        (
            ["--topology", "v5e:4x4", "nowhere.py"],
            "script must be an existing file",
        ),
        ([*ANY, "--html", "/nowhere/plan.html"], "'/nowhere/plan.html'"),
        ([*ANY, "--html", "."], "must be a file"),
    ],
)
def test_wrong_arguments_are_reported_at_once(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_topology_is_required(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "train.py"])
    assert "are required: --topology" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100:8x", "GPU (a100, h100, h200, b200)"),
        ("h100:8x9999", "at most 8,192 in total"),
        ("b200:0", "Pass, for example, 'h100:8' or 'h100:8x8'"),
    ],
)
def test_names_of_gpus_need_no_libtpu(
    name, words, tmp_path, monkeypatch, capfd
):
    script = tmp_path / "train.py"
    script.write_text("")
    # `main` sets them.
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    assert main(["plan", str(script), "--topology", name]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line
    assert f"Received: {name!r}" in line


def test_a_plugin_that_does_not_load_is_reported_in_a_line(
    tmp_path, monkeypatch, capfd
):
    script = tmp_path / "train.py"
    script.write_text("")
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable, os.environ.get(variable, ""))

    def fail(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    assert main(["plan", str(script), "--topology", "h100:8"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "CUDA" in line
    assert "h100:8" in line


def test_a_notebook_is_to_be_converted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    (tmp_path / "my notebook.ipynb").write_text(cells)
    words = ["my notebook.ipynb", "--topology", "v5e:4x4"]
    assert main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`jupyter nbconvert --to script 'my notebook.ipynb'`" in line
    assert "plan 'my notebook.py'" in line


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--topology", "v5e:4x4", "--", "--topology", "x"],
        ["--topology", "v5e:4x4", "train.py", "--", "--topology", "x"],
        ["--topology=v5e:4x4", "train.py", "--", "--topology", "x"],
    ],
)
def test_the_script_may_come_first(words, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "run", seen.append)
    main(["plan", *words])
    (options,) = seen
    assert options.script == "train.py"
    assert options.topology == ["v5e:4x4"]
    assert options.arguments == ["--topology", "x"]


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--epochs", "3"],
        ["train.py", "3"],
        ["-m", "a", "--epochs", "3"],
    ],
)
def test_arguments_of_the_script_come_after_dashes(words, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--topology", "v5e:4x4", *words])
    error = capsys.readouterr().err
    assert "unrecognized arguments" in error
    assert "come after --" in error


@pytest.mark.tpu
def test_a_script_is_planned_from_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        MIRRORED.replace("(30)", "(3000)").replace("(50, 30)", "(50, 3000)")
        + "import sys\nprint('a line of the script')\n"
        + "assert sys.argv[1:] == ['--epochs', '3'], sys.argv\n"
        + "model.fit(x, y)\n"
    )
    page = tmp_path / "plan.html"
    words = [sys.executable, "-m", "keras_strategies.cli", "plan"]
    words += ["--topology", "v5e:2x2", "--json", "--html", str(page)]
    words += [str(script), "--", "--epochs", "3"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    layouts = [step["layout"] for step in plan["steps"]]
    assert layouts == ["replicated", "slots", "sharded"]
    replicated, slots, sharded = (s["memory"] for s in plan["steps"])
    size = 4 * (40 * 3000 + 3000)
    assert replicated["weights"] == size
    assert sharded["weights"] < size / 3
    assert slots["slots"] < replicated["slots"] / 3
    assert "v5e:2x2" in page.read_text()


@pytest.mark.tpu
def test_an_interrupted_plan_prints_its_rows(tmp_path):
    script = tmp_path / "train.py"
    # The second slice has 8 chips.
    script.write_text(
        MIRRORED
        + "import time\n"
        + "time.sleep(600 * (strategy.num_replicas_in_sync == 8))\n"
        + "model.fit(x, y)\n"
    )
    code = (
        "import signal, sys\n"
        "from keras_strategies.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main())\n"
    )
    words = [sys.executable, "-c", code, "plan"]
    words += ["--topology", "v5e:2x2", "--topology", "v5e:2x4", "--json"]
    words += ["--layout", "replicated"]
    with subprocess.Popen(
        [*words, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = iter(process.stderr.readline, "")
        assert any("2x2 replicated was planned" in line for line in lines)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    plan = json.loads(out)
    (step,) = plan["steps"]
    assert step["topology"] == "v5e:2x2"
    assert step["error"] is None
    assert "interrupted after 1 of 2 candidates" in plan["notes"][-1]


@pytest.mark.tpu
def test_a_script_that_catches_all_errors_and_goes_on_is_planned(
    tmp_path, capfd
):
    script = tmp_path / "train.py"
    script.write_text(
        MIRRORED
        + "import time\n"
        + "while True:\n"
        + "    try:\n"
        + "        model.fit(x, y)\n"
        + "    except BaseException:\n"
        + "        time.sleep(0.1)\n"
    )
    words = ["--topology", "v5e:2x2", "--layout", "replicated", "--json"]
    assert main(["plan", *words, str(script)]) == 0
    (step,) = json.loads(capfd.readouterr().out)["steps"]
    assert step["error"] is None


@pytest.mark.tpu
@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_of_another_directory_is_planned(
    tmp_path, monkeypatch, capsys, is_module
):
    """With modules beside it, and none of the current directory."""
    imported = strangers.write(tmp_path / "here")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sizes.py").write_text("ROWS = 16")
    script = elsewhere / "train.py"
    script.write_text(
        MIRRORED + "import sizes\nmodel.fit(x, y, batch_size=sizes.ROWS)"
    )
    monkeypatch.chdir(elsewhere if is_module else tmp_path / "here")
    words = ["--topology", "v5e:2x2", "--layout", "replicated"]
    words += ["-m", "train"] if is_module else [str(script)]
    assert main(["plan", "--json", *words]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["rows"] == 16
    assert not imported.exists()


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "ks.MirroredStrategy()", "ended without either"),
        (HEAD + "np.load('/nowhere/x.npy')", "line 5 of"),
        (HEAD + "raise SystemExit('usage')", "exited with 'usage'"),
        (
            HEAD
            + "import argparse\nargparse.ArgumentParser().parse_args(['a'])",
            r"exited with 2 .* Its last output:\n(.*\n)*.*arguments: a",
        ),
        (
            MIRRORED.replace("(30)", "(15_000_000)").split("x, y")[0]
            + "model(np.zeros((1, 40)))",
            r"^Line 10 of .*: The .* 2.1 GB .*\(40, 15000000\).*passed.$",
        ),
    ],
)
def test_scripts_that_end_before_they_train(tmp_path, text, message, capfd):
    import re

    script = tmp_path / "train.py"
    script.write_text(text)
    words = ["--topology", "v5e:2x2", "--layout", "replicated", "--json"]
    assert main(["plan", *words, str(script)]) == 1
    (step,) = json.loads(capfd.readouterr().out)["steps"]
    assert re.search(message, step["error"]), step["error"]


def test_an_interruption_while_modules_are_imported_ends_quietly(monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    assert main(["plan", "script.py", "--topology", "v5e:2x2"]) == 130

"""Files, directories and notebooks, and the command `migrate`."""

import json
import os

import pytest

from keras_strategies.cli.main import main
from keras_strategies.migrate.notebooks import Notebook
from keras_strategies.migrate.project import find_files, port_files

pytestmark = pytest.mark.quick

TRAIN = """\
import tensorflow as tf
from lib.losses import dice
from lib import parse

strategy = tf.distribute.MirroredStrategy()
ds = tf.data.Dataset.range(3).map(parse.decode)
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
model.compile("adam", loss=dice)
"""
LOSSES = """\
import tensorflow as tf


def dice(a, b):
    return tf.reduce_sum(a * b)


def unknown(a):
    return tf.reduce_sum(a)
"""
PARSE = """\
import tensorflow as tf


def decode(x):
    return tf.cast(x, tf.float32)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "lib/losses.py").write_text(LOSSES)
    (tmp_path / "lib/parse.py").write_text(PARSE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_functions_are_followed_to_other_files(project):
    reports = {r.path: r for r in port_files(find_files(["."]))}
    losses = reports["./lib/losses.py"].after
    assert "return keras.ops.sum(a * b)" in losses
    assert losses.startswith("import keras_strategies as ks\nimport keras\n")
    assert "def unknown(a):\n    return tf.reduce_sum(a)" in losses
    assert reports["./lib/parse.py"].after == PARSE
    assert reports["./train.py"].num_changed == 4


def test_a_directory_has_files_and_notebooks_but_no_environments(tmp_path):
    for name in ("a.py", "b.ipynb", "c.txt", ".git/d.py", "env/lib/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "env/pyvenv.cfg").write_text("")
    found = find_files([str(tmp_path), str(tmp_path / "a.py")])
    assert [os.path.basename(path) for path in found] == ["a.py", "b.ipynb"]


def test_the_command_writes_only_when_asked(project, capsys):
    assert main(["migrate", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "train.py: 4 lines changed; nothing is left" in shown
    assert "--write" in shown
    assert (project / "train.py").read_text() == TRAIN
    assert main(["migrate", "train.py", "--diff"]) == 0
    assert "+strategy = ks.MirroredStrategy()" in capsys.readouterr().out
    assert (project / "train.py").read_text() == TRAIN
    os.chmod(project / "train.py", 0o750)
    assert main(["migrate", ".", "--write"]) == 0
    assert "3 files: 7 lines changed" in capsys.readouterr().out
    assert "ks.MirroredStrategy()" in (project / "train.py").read_text()
    assert os.stat(project / "train.py").st_mode & 0o777 == 0o750
    assert sorted(p.name for p in project.iterdir()) == ["lib", "train.py"]
    assert main(["migrate", ".", "--write"]) == 0
    assert capsys.readouterr().out.endswith("Nothing needs to change.\n")


def test_lines_that_are_left_are_reported(project, capsys):
    text = TRAIN + "tf.distribute.experimental.ParameterServerStrategy()\n"
    (project / "train.py").write_text(text)
    assert main(["migrate", "train.py"]) == 1
    shown = capsys.readouterr().out
    assert "5 lines changed; 1 is left:" in shown
    assert "train.py:12  `tf.distribute.experimental.Param" in shown
    assert main(["migrate", ".", "--write"]) == 1
    # The number is that of the line in the ported file.
    line = (project / "train.py").read_text().splitlines()[11]
    assert "ParameterServerStrategy" in line
    assert not line.startswith("#")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.py",
            b"import tensorflow\nprint 'x'\n",
            "line 2: it must be Python",
        ),
        ("a.py", b"# \xff tensorflow\n", "encoding"),
        ("a.ipynb", b"[]", "must have cells"),
        ("a.ipynb", b"{", "Expecting"),
    ],
)
def test_a_file_that_cannot_be_read(project, capsys, name, content, message):
    (project / name).write_bytes(content)
    assert main(["migrate", ".", "--write"]) == 2
    shown = capsys.readouterr().out
    assert f"./{name}: " in shown
    assert message in shown
    assert (project / name).read_bytes() == content
    assert "ks.MirroredStrategy()" in (project / "train.py").read_text()


def test_a_path_must_exist(capsys):
    assert main(["migrate", "none.py"]) == 2
    assert "Received: 'none.py'" in capsys.readouterr().err


def test_line_breaks_and_encodings_stay(project):
    text = "# -*- coding: latin-1 -*-\r\nimport tensorflow as tf\r\n"
    text += "x = 'é', tf.keras.layers.Dense(1)\r\n"
    (project / "a.py").write_bytes(text.encode("latin-1"))
    assert main(["migrate", "a.py", "--write"]) == 0
    assert (project / "a.py").read_bytes().decode("latin-1") == (
        "# -*- coding: latin-1 -*-\r\nimport keras_strategies as ks\r\n"
        "import keras\r\nx = 'é', keras.layers.Dense(1)\r\n"
    )


CELLS = [
    "%%bash\nls",
    "!pip install keras-strategies \\\n  -q\nimport tensorflow as tf\n"
    "%time x = 1",
    "strategy = tf.distribute.MirroredStrategy()\nfiles = !ls\nif files:\n"
    "    !echo $files\n    %matplotlib inline",
    "tf.gradients?",
    "this is not python (",
    "x = (3\n  % 2)\n\n",
    "",
    "with strategy.scope():\n    m = tf.compat.v1.Session()",
]


def make_notebook(cells, **more):
    return {
        "cells": [{"cell_type": "markdown", "source": ["# tf.function\n"]}]
        + [
            {
                "cell_type": "code",
                "execution_count": None,
                "outputs": [],
                "source": cell.splitlines(keepends=True),
            }
            for cell in cells
        ],
        "metadata": {"é": 1},
        "nbformat": 4,
    } | more


def test_a_notebook_keeps_its_magics_and_its_form(project, capsys):
    text = json.dumps(make_notebook(CELLS), indent=1, ensure_ascii=False) + "\n"
    (project / "a.ipynb").write_text(text, "utf-8")
    assert main(["migrate", "a.ipynb", "--write"]) == 1
    shown = capsys.readouterr().out
    assert "a.ipynb, cell 9, line 3  `tf.compat.v1.Session`" in shown
    expected = list(CELLS)
    expected[1] = expected[1].replace(
        "import tensorflow", "import keras_strategies as ks\nimport tensorflow"
    )
    expected[2] = expected[2].replace("tf.distribute.M", "ks.M")
    session = "tf.compat.v1.Session` has no counterpart"
    before, after = expected[7].split("\n")
    expected[7] = (
        f"{before}\n    # ks-migrate: `{session}: call functions, without "
        f"sessions or graphs\n{after}"
    )
    new = json.dumps(make_notebook(expected), indent=1, ensure_ascii=False)
    assert (project / "a.ipynb").read_text("utf-8") == new + "\n"
    assert main(["migrate", "a.ipynb", "--write"]) == 1
    assert (project / "a.ipynb").read_text("utf-8") == new + "\n"


def test_a_notebook_without_tensorflow_is_untouched(project):
    text = json.dumps(make_notebook(["!ls", "x=1"]), separators=(",", ":"))
    (project / "a.ipynb").write_text(text)
    assert main(["migrate", "a.ipynb", "--write"]) == 0
    assert (project / "a.ipynb").read_text() == text


def test_a_notebook_whose_sources_are_texts():
    document = make_notebook([])
    document["cells"] = [{"cell_type": "code", "source": "a = 1\n!b"}]
    notebook = Notebook(json.dumps(document))
    (cell,) = json.loads(notebook.render(notebook.source))["cells"]
    assert cell["source"] == "a = 1\n!b"

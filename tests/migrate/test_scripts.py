"""The public scripts that `./run bench migrate` ports: scripts.txt."""

import pathlib

import pytest

from benchmarks.migrate import LIST, port, read_list

pytestmark = pytest.mark.quick


def test_the_list_has_31_scripts_of_31_authors():
    scripts = list(read_list())
    lines = LIST.read_text("utf-8").splitlines()
    assert len(scripts) == sum(line.startswith("https:") for line in lines)
    owners = {repository.split("+")[0] for repository, _, _ in scripts}
    assert len(owners) == len(scripts) == 31
    assert sum(is_run for _, _, is_run in scripts) >= 4


def test_a_script_is_ported_with_the_files_beside_it(tmp_path):
    directory = tmp_path / "owner+name"
    directory.mkdir()
    (directory / "a.py").write_text(
        "import tensorflow as tf\nimport b\n"
        "tf.distribute.get_strategy().run(b.step)\ntf.contrib.x()\n"
    )
    (directory / "b.py").write_text(
        "import tensorflow as tf\ndef step():\n    return tf.exp(1.0)\n"
    )
    script, changed, left = port(tmp_path, "owner+name", "a.py")
    assert pathlib.Path(script).read_text().count("ks.") == 1
    assert "keras.ops.exp" in (script.parent / "b.py").read_text()
    assert changed >= 3
    assert left == ["`tf.contrib` has no counterpart"]
    assert "tf.distribute" in (directory / "a.py").read_text()

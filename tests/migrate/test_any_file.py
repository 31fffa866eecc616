"""Any Python file can be ported, and a second run changes nothing."""

import ast
import pathlib
import random
import sysconfig
import time
import warnings

import pytest

from keras_strategies.migrate.porting import port_sources

STANDARD = pathlib.Path(sysconfig.get_path("stdlib"))
INSTALLED = pathlib.Path(sysconfig.get_path("purelib"))
SECONDS_PER_1000_LINES = 3


def find_package():
    return INSTALLED / "tensorflow"


def list_files(directory):
    found = [
        path
        for path in directory.rglob("*.py")
        if directory != STANDARD or "site-packages" not in path.parts
    ]
    random.Random(0).shuffle(found)
    return found


def read(path):
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""


def port(source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return port_sources({"file": ("file", source)})["file"]


def parse(source):
    """Returns a file's tree; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            # An invalid escape sequence is a warning.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError:
        return None


def check(path):
    """Ports a file; returns whether it has changed."""
    source = read(path)
    ported = port(source)
    tree = parse(source)
    if tree is None:
        assert ported.code == source, path
        return False
    assert not ported.error, path
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [
        name
        for node in imports
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    ]
    uses_it = any(name.split(".")[0] == "tensorflow" for name in names)
    if not uses_it and "keras.distribution" not in source:
        assert ported.code == source, path
    assert parse(ported.code) is not None, path
    assert port(ported.code).code == ported.code, path
    return ported.code != source


def test_a_sample():
    files = list_files(STANDARD)[:10] + list_files(find_package())[:10]
    assert sum(map(check, files)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_all_files(part):
    files = list_files(STANDARD) + list_files(find_package())
    assert len(files) > 3000
    for path in files[part::20]:
        check(path)


def test_a_thousand_lines_take_seconds():
    step = (
        "def step{0}(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        y = tf.reduce_mean(tf.cast(model(x), tf.float32), axis=-1)\n"
        "    return tf.keras.losses.mse(y, x), tape.gradient(y, x)\n"
        "strategy.run(step{0}, args=(1,))\n"
    )
    source = "import tensorflow as tf\n" + "".join(
        step.format(index) for index in range(200)
    )
    start = time.process_time()
    ported = port(source)
    assert time.process_time() - start < SECONDS_PER_1000_LINES
    assert ported.code.count("ks.GradientTape") == 200
    assert ported.code.count("keras.ops.mean(keras.ops.cast(model(x)") == 200

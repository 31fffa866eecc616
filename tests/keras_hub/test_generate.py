"""`generate` of keras-hub's tasks with sharded weights and in a job."""

import contextlib
import functools
import json
import os
import pathlib
import re

import jax
import pytest

import keras_strategies as ks
from tests.support.commands import python

pytestmark = [
    pytest.mark.keras_hub,
    pytest.mark.filterwarnings("ignore"),
]
REPLICAS = 4


@pytest.fixture
def programs(monkeypatch):
    """The compiled programs of `generate`."""
    texts, jit = [], jax.jit

    def recording(function=None, **options):
        if function is None:
            return functools.partial(recording, **options)
        jitted = jit(function, **options)
        if "generate" not in function.__name__:
            return jitted

        def call(*args):
            texts.append(jitted.lower(*args).compile().as_text())
            return jitted(*args)

        return call

    monkeypatch.setattr(jax, "jit", recording)
    return texts


@pytest.mark.parametrize("is_in_scope", [False, True])
def test_sharded_weights_are_not_gathered_for_tokens(programs, is_in_scope):
    pytest.importorskip("keras_hub", reason="./run test -m keras_hub")
    from tests.keras_hub import generating

    expected = generating.generate(generating.build(), 0)
    strategy = ks.MirroredStrategy(
        jax.devices()[:REPLICAS], variable_partitioner=generating.SHARDED
    )
    with strategy.scope():
        task = generating.build()
    programs.clear()
    with strategy.scope() if is_in_scope else contextlib.nullcontext():
        assert generating.generate(task, 0) == expected
    text = programs[-1]
    assert " while(" in text
    # The table's and a kernel's shards; sums of activations.
    assert re.search(r"f32\[64,8\]\S* parameter", text)
    found = re.findall(r"(\w+)\[\S* (all-\w+|reduce-\w+)(?:-start)?\(", text)
    assert ("f32", "all-reduce") in found
    assert ("f32", "all-gather") not in found


def test_processes_generate_from_the_same_prompts(tmp_path):
    pytest.importorskip("keras_hub", reason="./run test -m keras_hub")
    ended = python(
        *("-m", "keras_strategies.cli", "launch", "--processes", 2),
        *("--devices-per-process", 2, "-m", "tests.keras_hub.generating"),
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": ""},
        timeout=600,
    )
    lines = re.findall(r"found (\{.*\})", ended.stdout)
    assert len(lines) == 2, ended.stdout + ended.stderr
    for found in map(json.loads, lines):
        mirrored, sharded = found["mirrored"], found["sharded"]
        assert mirrored.pop("one process", True) is True
        assert mirrored.pop("other prompts") is True
        assert mirrored.pop("other scores") is True
        refused = sharded.pop("other prompts"), found["other seeds"]
        names = "generate", "generate", "a call of the layer 'token_embedding'"
        refused = *refused, sharded.pop("other scores")
        for text, name in zip(refused, names, strict=True):
            assert "share variables must provide equal values" in text
            assert f"{name}. Received" in text
        for values in (mirrored, sharded):
            assert values.pop("in a callback") == [True, True]
            names = "in scope", "equal prompts", "scores"
            assert values == dict.fromkeys(names, True)

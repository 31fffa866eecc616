"""Mappings of users' own classes among what `run` takes and returns."""

import collections
import contextlib

import numpy as np
import pytest

import keras_strategies as ks
from tests.support.plain_keras import mirrored


class OwnDict(dict):
    """A class of its own, as the outputs of many libraries are."""


class OwnMapping(collections.abc.Mapping):
    """As of tf's own test: no dict, and made of one."""

    def __init__(self, *args, **kwargs):
        self._items = dict(*args, **kwargs)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class OwnList(list):
    pass


class Stubborn(dict):
    def __init__(self):
        super().__init__()


def ids():
    return ks.get_replica_context().replica_id_in_sync_group + 0.0


CLASSES = [OwnDict, OwnMapping, collections.OrderedDict]
debug = pytest.mark.parametrize(
    "debug", [False, True], ids=["program", "debug"]
)


def run(strategy, fn, args=(), *, debug=False):
    with strategy.debug() if debug else contextlib.nullcontext():
        return strategy.run(fn, args=args)


@debug
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_results_keep_the_class_of_a_mapping(cls, replicas, debug):
    strategy = mirrored(replicas)
    for _ in range(2):
        out = run(
            strategy,
            lambda: [cls(b=ids(), a=cls(c=(ids(), None))), cls()],
            debug=debug,
        )
    first, empty = out
    assert type(first) is type(first["a"]) is type(empty) is cls
    assert list(first) == ["b", "a"]
    assert first["a"]["c"][1] is None
    local = strategy.experimental_local_results(first["b"])
    assert [float(v) for v in local] == list(range(replicas))
    reduced = strategy.reduce("sum", first, axis=None)
    assert type(reduced) is cls
    assert float(reduced["a"]["c"][0]) == sum(range(replicas))
    parts = strategy.experimental_local_results(first)
    assert [(type(p), float(p["b"])) for p in parts] == [
        (cls, float(k)) for k in range(replicas)
    ]


@debug
def test_results_of_replicas_with_other_rows(debug):
    strategy = mirrored(2)
    rows = np.arange(3, dtype="float32")[:, None]
    (x,) = strategy.experimental_distribute_dataset(iter([rows]))
    out = run(strategy, lambda x: OwnDict(x=x), (x,), debug=debug)
    assert type(out) is OwnDict
    gathered = strategy.gather(out, axis=0)
    assert type(gathered) is OwnDict
    np.testing.assert_array_equal(gathered["x"], rows)


@debug
@pytest.mark.parametrize("cls", CLASSES)
def test_arguments_keep_the_class_of_a_mapping(cls, debug):
    strategy = mirrored(2)
    values = strategy.run(lambda: cls(x=ids()))
    seen = []

    def step(given, options):
        seen.append((type(given), options))
        return given["x"] + 1

    # Without values of replicas it is an object like any other.
    options = Stubborn()
    out = run(strategy, step, (values, options), debug=debug)
    local = strategy.experimental_local_results(out)
    assert [float(v) for v in local] == [1.0, 2.0]
    assert {cls} == {kind for kind, _ in seen}
    assert all(given is options for _, given in seen)


def test_lists_of_other_classes_become_lists():
    out = mirrored(2).run(lambda: OwnList([ids(), 2]))
    assert type(out) is list
    assert out[1] == 2

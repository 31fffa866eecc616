"""Values for `parametrize`, of which a part runs by default."""

import itertools

import pytest


def combine(*axes, every):
    """All combinations; each `every`-th runs by default, the others are slow.

    A default one lies on a diagonal, so that each value of each axis occurs.

    Args:
      *axes: The values of each parameter; a single axis gives single values.
      every: Which of the diagonals run by default.
    """
    return _marked(axes, lambda place: sum(place) % every == 0)


def cover(*axes):
    """All combinations; those that run by default have each value of each axis,
    and are as few as the longest axis has values."""
    sizes = [len(axis) for axis in axes]
    first = {tuple(k % size for size in sizes) for k in range(max(sizes))}
    return _marked(axes, first.__contains__)


def _marked(axes, is_default):
    params = []
    for case in itertools.product(*map(enumerate, axes)):
        place, values = zip(*case, strict=True)
        marks = () if is_default(place) else pytest.mark.slow
        params.append(pytest.param(*values, marks=marks))
    return params


def few(values, every):
    """All values, of several parameters each; each `every`-th runs by default.

    What `pytest.param` has marked stays as it is, and is not counted.
    """
    params, count = [], 0
    for value in values:
        param = value if hasattr(value, "marks") else pytest.param(*value)
        if not param.marks:
            marks = pytest.mark.slow if count % every else ()
            param = pytest.param(*param.values, marks=marks, id=param.id)
            count += 1
        params.append(param)
    return params


def some(values, default):
    """All values; those of `default` run by default, the others are slow."""
    assert default <= set(values)
    return [
        pytest.param(value, marks=() if value in default else pytest.mark.slow)
        for value in values
    ]

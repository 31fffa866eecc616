"""Orders: Keras's draws, as a pure function of a seed and the epoch."""

import base64
import random

import numpy as np
import pytest

from keras_strategies.data.shuffled_orders import (
    BatchOrder,
    NumberedBatchOrder,
    NumberedRowOrder,
    RowOrder,
)

pytestmark = pytest.mark.quick


def row_order():
    return RowOrder(13)


def window_order():
    return RowOrder(13, window=4)


def batch_order():
    return BatchOrder(7)


MAKERS = [row_order, window_order, batch_order]


@pytest.fixture(autouse=True)
def _seeded():
    states = random.getstate(), np.random.get_state()
    random.seed(3)
    np.random.seed(3)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def lists(order, epochs):
    return [order.compute(epoch).tolist() for epoch in epochs]


def test_rows_are_in_the_order_of_numpys_draws():
    order = RowOrder(13)
    state = np.random.get_state()
    made = lists(order, range(3))
    after = np.random.random()
    np.random.set_state(state)
    assert made == [np.random.permutation(13).tolist() for _ in range(3)]
    # The global generator has moved on, as drawing from it would.
    assert np.random.random() == after


def test_rows_are_shuffled_within_windows():
    order = RowOrder(13, window=4).compute(0)
    for start in range(0, 13, 4):
        window = order[start : start + 4]
        assert sorted(window) == list(range(start, min(start + 4, 13)))


def test_batches_are_in_the_order_of_pythons_draws():
    order = BatchOrder(7)
    state = random.getstate()
    made = lists(order, range(3))
    after = random.random()
    random.setstate(state)
    for epoch in range(3):
        indices = list(range(7))
        random.shuffle(indices)
        assert made[epoch] == indices
    assert random.random() == after


@pytest.mark.parametrize("make", MAKERS)
def test_any_epoch_may_be_asked_for_at_any_time(make):
    order = make()
    first = lists(order, range(5))
    assert lists(order, [4, 0, 2, 2, 3]) == [first[i] for i in [4, 0, 2, 2, 3]]
    assert len({tuple(epoch) for epoch in first}) > 1


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_orders_elsewhere(make):
    order = make()
    expected = lists(order, range(3))
    random.seed(99)
    np.random.seed(99)
    other = make()
    assert lists(other, range(3)) != expected
    other.restart(order.seed)
    assert lists(other, range(3)) == expected
    assert other.seed == order.seed


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_is_kept_while_orders_are_drawn(make):
    order = make()
    seed = order.seed
    order.compute(3)
    assert order.seed == seed


@pytest.mark.parametrize("make", MAKERS)
def test_skip_makes_the_second_order_the_first(make):
    order = make()
    expected = lists(order, range(3))
    order.restart(order.seed)
    order.skip()
    assert lists(order, range(2)) == expected[1:]


@pytest.mark.parametrize("make", MAKERS)
def test_somebody_elses_draws_change_nothing(make):
    expected = lists(make(), range(3))
    random.seed(3)
    np.random.seed(3)
    order = make()
    made = lists(order, [0])
    random.random(), np.random.random()
    states = random.getstate(), np.random.get_state()[1].tolist()
    assert made + lists(order, [1, 2]) == expected
    # And those draws are not disturbed either.
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("make", MAKERS)
def test_a_spare_gaussian_is_part_of_the_seed(make):
    np.random.normal()
    random.gauss(0, 1)
    order = make()
    order.compute(0)
    other = make()
    other.restart(order.seed)
    assert other.seed == order.seed
    assert other.compute(2).tolist() == order.compute(2).tolist()


@pytest.mark.parametrize("size", [0, 1])
def test_small_orders(size):
    assert RowOrder(size).compute(1).tolist() == list(range(size))
    assert BatchOrder(size).compute(1).tolist() == list(range(size))
    assert BatchOrder(size).compute(1).dtype.kind == "i"


def damaged(seed, **changed):
    """A seed with other words, position or version."""
    words, *others = seed.split(":")
    numbers = np.frombuffer(base64.b64decode(words), "<u4").copy()
    if "last" in changed:
        numbers[-1] = changed["last"]
    if "count" in changed:
        numbers = np.resize(numbers, changed["count"])
    others[0] = changed.get("first", others[0])
    words = base64.b64encode(numbers.tobytes()).decode()
    return ":".join([words, *others])


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        # Beyond the words, where numpy would read memory of others.
        (row_order, {"first": "1000000"}),
        (row_order, {"first": "-1"}),
        (row_order, {"count": 623}),
        (row_order, {"count": 625}),
        (batch_order, {"last": 625}),
        (batch_order, {"count": 624}),
        (batch_order, {"first": "2"}),
    ],
)
def test_a_seed_that_is_no_state_of_a_generator_is_refused(make, changed):
    order = make()
    before = lists(order, range(2))
    with pytest.raises(ValueError, match=r"generator|position|version"):
        order.restart(damaged(order.seed, **changed))
    assert lists(order, range(2)) == before


# Orders by the number of an epoch: tests/contract/test_keras_names.py compares
# them with those of Keras 3.16.

NUMBERED = {
    "rows": (lambda: NumberedRowOrder(13), row_order),
    "windows": (lambda: NumberedRowOrder(13, window=4), window_order),
    "batches": (lambda: NumberedBatchOrder(7), batch_order),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_orders_by_number_know_no_random_state(name):
    make, _ = NUMBERED[name]
    states = random.getstate(), np.random.get_state()[1].tolist()
    first = lists(make(), range(4))
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    random.seed(99)
    np.random.seed(99)
    order = make()
    order.skip()
    assert lists(order, [3, 0, 2, 1]) == [first[i] for i in [3, 0, 2, 1]]
    assert len({tuple(epoch) for epoch in first}) == 4
    assert all(sorted(e) == sorted(first[0]) for e in first)


@pytest.mark.parametrize("name", NUMBERED)
def test_a_pass_has_the_number_of_the_epoch_that_it_begins_in(name):
    make, _ = NUMBERED[name]
    each = lists(make(), range(7))
    order = make()
    order.set_epochs_per_pass(3)
    assert lists(order, range(3)) == [each[0], each[3], each[6]]
    # That belongs to what a position needs to find the orders again.
    other = make()
    other.restart(order.seed)
    assert lists(other, range(3)) == [each[0], each[3], each[6]]
    assert other.seed == order.seed != make().seed


@pytest.mark.parametrize("name", NUMBERED)
def test_orders_of_one_kind_refuse_seeds_of_the_other(name):
    numbered, drawn = (make() for make in NUMBERED[name])
    for order, seed in ((numbered, drawn.seed), (drawn, numbered.seed)):
        before = order.seed
        with pytest.raises(ValueError):  # noqa: PT011
            order.restart(seed)
        assert order.seed == before
    kind = numbered.seed.removesuffix(":1")
    other_kind = "rows" if kind.startswith("batches") else "batches"
    ends = ("", ":0", ":-1", ":1:1", ":12345678901")
    for text in (
        *(kind + end for end in ends),
        f"{other_kind} by number:1",
        "",
    ):
        with pytest.raises(ValueError, match="data and Keras that the run"):
            numbered.restart(text)


@pytest.mark.parametrize("make", [BatchOrder, NumberedBatchOrder])
def test_batches_may_become_more(make):
    order = make(4)
    assert sorted(order.compute(0)) == list(range(4))
    order.resize(6)
    assert sorted(order.compute(1)) == list(range(6))

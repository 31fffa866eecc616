"""Reading ahead in a thread: order, errors, pauses and ends."""

import gc
import itertools
import threading

import pytest

from keras_strategies.data import prefetch
from keras_strategies.data.prefetch import Prefetched

LIMIT = 20  # Seconds; nothing here takes so long.


def prefetched(make, num_bytes=lambda item: 8, is_pause=lambda item: False):
    return Prefetched(make, num_bytes=num_bytes, is_pause=is_pause)


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "keras_strategies-prefetch" and thread.is_alive()
    ]


class Recorded:
    """An endless iterator that tells what was asked of it."""

    def __init__(self, count=None):
        self.items = itertools.count()
        self.count = count
        self.made = []
        self.changed = threading.Condition()
        self.is_closed = False

    def __call__(self, is_stopped):
        self.is_stopped = is_stopped
        try:
            for item in self.items:
                if item == self.count:
                    return
                with self.changed:
                    self.made.append(item)
                    self.changed.notify_all()
                yield item
        finally:
            with self.changed:
                self.is_closed = True
                self.changed.notify_all()

    def wait_for(self, predicate):
        with self.changed:
            assert self.changed.wait_for(predicate, LIMIT)


def test_items_come_in_their_order():
    items = prefetched(Recorded(50))
    assert list(items) == list(range(50))
    with pytest.raises(StopIteration):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_nothing_is_read_before_it_is_asked_for():
    recorded = Recorded(3)
    items = prefetched(recorded)
    assert not recorded.made
    assert not threads()
    assert list(items) == [0, 1, 2]


def test_an_error_comes_where_its_item_would_have():
    def make(is_stopped):
        yield 1
        yield 2
        raise OSError("gone")

    items = prefetched(make)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_an_error_of_making_the_iterator_is_raised():
    def make(is_stopped):
        raise OSError("no iterator")

    with pytest.raises(OSError, match="no iterator"):
        next(prefetched(make))


def test_an_error_of_a_size_is_raised():
    def num_bytes(item):
        raise OSError("no size")

    with pytest.raises(OSError, match="no size"):
        next(prefetched(Recorded(3), num_bytes=num_bytes))


def test_no_more_than_the_depth_is_read_ahead():
    recorded = Recorded()
    items = prefetched(recorded)
    depth = prefetch._depth(8)
    for taken in range(1, 30):
        assert next(items) == taken - 1
        # More is read when half of what was read ahead is given out.
        recorded.wait_for(
            lambda taken=taken: len(recorded.made) > taken + depth // 2
        )
        assert len(recorded.made) <= taken + depth
    items.close()
    assert len(recorded.made) <= taken + depth


def test_large_items_are_read_one_by_one():
    assert prefetch._depth(1 << 60) == 1
    assert prefetch._depth(0) == prefetch._MAX_DEPTH


def test_a_pause_lasts_until_the_next_item_is_asked_for():
    recorded = Recorded()
    items = prefetched(recorded, is_pause=lambda item: item % 3 == 2)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    assert recorded.made == [0, 1, 2]
    assert next(items) == 3
    recorded.wait_for(lambda: recorded.made == [0, 1, 2, 3, 4, 5])
    assert [next(items), next(items)] == [4, 5]
    assert recorded.made == [0, 1, 2, 3, 4, 5]
    items.close()


def test_closing_ends_the_thread_and_the_iterator():
    recorded = Recorded()
    items = prefetched(recorded)
    next(items)
    items.close()
    assert recorded.is_closed
    assert recorded.is_stopped()
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)
    items.close()


def test_closing_what_was_never_started():
    items = prefetched(Recorded())
    items.close()
    del items
    assert not threads()


def test_collected_without_being_finished():
    recorded = Recorded()
    items = prefetched(recorded)
    next(items)
    del items
    gc.collect()
    recorded.wait_for(lambda: recorded.is_closed)
    assert not threads()


def test_the_thread_ends_with_the_iterator():
    assert list(prefetched(Recorded(3))) == [0, 1, 2]
    for thread in threads():
        thread.join(LIMIT)
    assert not threads()


def test_one_that_waits_is_told_to_stop():
    is_told = threading.Event()

    def make(is_stopped):
        yield 0
        while not is_stopped():
            pass
        is_told.set()
        raise InterruptedError

    items = prefetched(make)
    assert next(items) == 0
    items.close()
    assert is_told.wait(LIMIT)
    with pytest.raises(StopIteration):
        next(items)

"""Reading ahead in a thread: order, errors, pauses and ends."""

import gc
import itertools
import threading

import pytest

from keras_strategies.data import prefetch
from keras_strategies.data.prefetch import Prefetched
from tests.support.combinations import combine
from tests.support.commands import python

pytestmark = pytest.mark.quick

LIMIT = 60  # Seconds; nothing here takes so long.


def prefetched(make, is_pause=lambda item: False, needs_thread=True):
    stop = threading.Event()
    return Prefetched(
        make(stop.is_set), stop, is_pause=is_pause, needs_thread=needs_thread
    )


def all_threads():
    return {
        thread
        for thread in threading.enumerate()
        if thread.name == "keras_strategies-prefetch" and thread.is_alive()
    }


_other_rows = set()


@pytest.fixture(autouse=True)
def _threads_of_this_test():
    """Leaves out those of feeds that earlier tests left unfinished."""
    _other_rows.clear()
    _other_rows.update(all_threads())


def threads():
    return all_threads() - _other_rows


def wait_for_threads():
    """Of what ends by itself, a moment after what can be seen of it."""
    for thread in threads():
        thread.join(LIMIT)
    assert not threads()


class Recorded:
    """An infinite iterator that tells what was asked of it."""

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


def test_no_more_than_the_depth_is_read_ahead():
    recorded = Recorded()
    items = prefetched(recorded)
    depth = prefetch._DEPTH
    for taken in range(1, 30):
        assert next(items) == taken - 1
        # More is read when half of what was read ahead is given out.
        recorded.wait_for(
            lambda taken=taken: len(recorded.made) > taken + depth // 2
        )
        assert len(recorded.made) <= taken + depth
    items.close()
    assert len(recorded.made) <= taken + depth


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
    wait_for_threads()


def test_the_thread_ends_with_the_iterator():
    assert list(prefetched(Recorded(3))) == [0, 1, 2]
    wait_for_threads()


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


class TestQuickItems:
    """Items that take less time than a thread's turn need no thread."""

    @pytest.fixture
    def clock(self, monkeypatch):
        return Clock(monkeypatch)

    def test_they_are_made_where_they_are_asked_for(self, clock):
        recorded = Recorded(20)
        items = prefetched(recorded, needs_thread=False)
        for asked in range(1, 21):
            assert next(items) == asked - 1
            assert recorded.made == list(range(asked))
        assert not threads()
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(items)

    @pytest.mark.parametrize("first_slow", [0, 1, 7])
    @pytest.mark.parametrize("seconds", [0.02, 0.002])
    def test_a_thread_goes_on_when_they_get_slow(
        self, clock, first_slow, seconds
    ):
        recorded = Recorded(40)

        def make(is_stopped):
            for item in recorded(is_stopped):
                clock.now += seconds if item >= first_slow else 0.0001
                yield item

        items = prefetched(make, needs_thread=False)
        taken = [next(items) for _ in range(first_slow + 4)]
        recorded.wait_for(lambda: len(recorded.made) > len(taken))
        assert taken + list(items) == list(range(40))
        assert recorded.made == list(range(40))

    def test_one_hiccup_needs_no_thread(self, clock):
        def make(is_stopped):
            for item in range(30):
                clock.now += 0.002 if item == 10 else 0.0002
                yield item

        items = prefetched(make, needs_thread=False)
        for item in range(30):
            assert next(items) == item
            assert not threads()

    def test_a_pause_is_kept_when_a_thread_goes_on(self, clock):
        recorded = Recorded()

        def make(is_stopped):
            for item in recorded(is_stopped):
                clock.now += 0.02 * (item == 2)
                yield item

        items = prefetched(
            make, is_pause=lambda item: item % 3 == 2, needs_thread=False
        )
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        assert threads()
        assert recorded.made == [0, 1, 2]
        assert next(items) == 3
        recorded.wait_for(lambda: recorded.made == [0, 1, 2, 3, 4, 5])
        items.close()
        assert recorded.is_closed

    def test_an_error_ends_them(self, clock):
        def make(is_stopped):
            yield 1
            raise OSError("gone")

        items = prefetched(make, needs_thread=False)
        assert next(items) == 1
        with pytest.raises(OSError, match="gone"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)

    @pytest.mark.parametrize("num_taken", [0, 1])
    def test_closing_ends_the_iterator(self, clock, num_taken):
        recorded = Recorded()
        items = prefetched(recorded, needs_thread=False)
        for _ in range(num_taken):
            next(items)
        items.close()
        assert recorded.is_closed == bool(num_taken)
        with pytest.raises(StopIteration):
            next(items)


class Clock:
    """A clock that stands still but for what a test adds."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(
            prefetch.time, "perf_counter", lambda: self.now, raising=True
        )


LEFT_OPEN = """
import threading

from keras_strategies.data import prefetch

items = prefetch.Prefetched(
    iter(range(9)),
    threading.Event(),
    is_pause=lambda item: False,
    needs_thread={needs_thread},
)
next(items)
# What a module holds goes after its functions that begin with "_".
prefetch.items = items
del items
raise SystemExit("left")
"""


@pytest.mark.parametrize("needs_thread", combine([True, False], every=2))
def test_a_process_ends_in_the_middle(needs_thread):
    ended = python(
        "-c", LEFT_OPEN.format(needs_thread=needs_thread), timeout=LIMIT
    )
    # JAX's plugin for CUDA, if it is there, writes lines before.
    *_, last = ended.stderr.splitlines()
    assert (ended.returncode, last) == (1, "left")

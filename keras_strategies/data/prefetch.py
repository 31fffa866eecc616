"""Iterators that prefetch items in a thread, and that regroup rows."""

import collections
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.batch_spec import find_row_kind
from keras_strategies.data.source import Part
from keras_strategies.spmd.batches import num_rows

Item = TypeVar("Item")

# Number of items that are made ahead of time.
_DEPTH = 2
_LAST_ITEM_S = 5.0
# Switching threads takes 0.2 ms, and the prefetching thread competes with the
# consumer for the interpreter. Items that take less time than this are
# therefore made in the consumer's thread.
_QUICK_S = 0.0005
# A single item that takes this long is enough to start the thread, since jitter
# cannot be the cause.
_SLOW_S = 0.005


class Prefetched(Generic[Item]):
    """An iterator whose items are made ahead of time in a thread.

    If the underlying iterator raises an error, `next` raises it once the items
    before the error have been returned. If `needs_thread` is True, the thread
    starts when the first item is requested; otherwise, it starts once items
    turn out to be slow to make. The thread ends with the underlying iterator,
    or when this object is closed or garbage-collected.

    Args:
      items: The underlying iterator, which makes the items. If it has to wait
        for something, it must stop waiting once `stop` is set.
      stop: An event that is set when this object is closed.
      is_pause: A function that is called with an item. If it returns True, the
        next item is made only when it is requested, because it may never be
        needed.
      needs_thread: Whether even quick items are made in the thread.
    """

    def __init__(
        self,
        items: Iterator[Item],
        stop: threading.Event,
        is_pause: Callable[[Item], bool],
        *,
        needs_thread: bool = True,
    ) -> None:
        self._buffer = _Buffer(items, stop, is_pause)
        self._thread = threading.Thread(
            target=self._buffer.fill,
            name="keras_strategies-prefetch",
            daemon=True,
        )
        self._is_quick = not needs_thread
        # A running mean of the time to make an item, in seconds.
        self._mean_s = 0.0

    def __iter__(self) -> "Prefetched[Item]":
        return self

    def __next__(self) -> Item:
        if self._is_quick:
            return self._make_here()
        if self._thread.ident is None:
            self._thread.start()
        return self._buffer.take()

    def _make_here(self) -> Item:
        """Makes the next item in this thread.

        Also starts the prefetching thread if items have become slow to make.
        """
        buffer = self._buffer
        if buffer.is_over:
            raise StopIteration
        start = time.perf_counter()
        try:
            item = next(buffer.iterator)
        except BaseException:
            buffer.is_over = True
            raise
        seconds = time.perf_counter() - start
        # Clipped, so that a single item that takes less than `_SLOW_S` cannot
        # start the thread.
        self._mean_s += 0.25 * (min(seconds, 2 * _QUICK_S) - self._mean_s)
        buffer.num_requested += 1
        buffer.num_made += 1
        if seconds > _SLOW_S or self._mean_s > _QUICK_S:
            self._is_quick = False
            buffer.must_pause = buffer.is_pause(item)
            self._thread.start()
        return item

    def close(self) -> None:
        """Ends the iteration and stops the thread.

        Waits briefly for the thread to finish the item that it is reading,
        since another reader may use the same data afterwards.
        """
        self._buffer.close()
        is_waited_for = (
            self._thread.is_alive()
            and self._thread is not threading.current_thread()
            # While Python exits, daemon threads no longer run.
            and not sys.is_finalizing()
        )
        if is_waited_for:
            self._thread.join(_LAST_ITEM_S)
        if self._is_quick:
            _close(self._buffer.iterator)

    def __del__(self) -> None:
        # When Python exits, threads are stopped and module globals are None.
        if sys is not None and not sys.is_finalizing():
            self.close()


class _Buffer(Generic[Item]):
    """The state that the thread shares with its `Prefetched` object.

    The thread refers only to this state and not to the `Prefetched` object, so
    that the latter can be garbage-collected.
    """

    def __init__(
        self,
        iterator: Iterator[Item],
        stop: threading.Event,
        is_pause: Callable[[Item], bool],
    ) -> None:
        self.iterator = iterator
        self.is_pause = is_pause
        self.num_requested = self.num_made = 0
        self.must_pause = self.is_over = False
        self._stop = stop
        self._changed = threading.Condition()
        self._items: collections.deque[Item] = collections.deque()
        self._error: BaseException | None = None

    def take(self) -> Item:
        """Waits for the next item and returns it."""
        with self._changed:
            self.num_requested += 1
            if not self._items:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self.is_over)
            if self._items:
                item = self._items.popleft()
                # The thread is not woken for each item, since switching threads
                # may take as long as making a batch.
                if self._is_low():
                    self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Makes the thread stop and drops all items."""
        with self._changed:
            self._stop.set()
            self.is_over = True
            self._items.clear()
            self._changed.notify_all()

    def fill(self) -> None:
        """Makes items until the end or `close`. Runs in the thread."""
        try:
            if not self._wait_until_needed():
                return
            for item in self.iterator:
                self._put(item)
                del item
                if not self._wait_until_needed():
                    return  # Otherwise the `for` would read one more item.
        except BaseException as error:  # `take` raises it in the consumer.
            if not self._stop.is_set():  # After `close`, no consumer waits.
                self._error = error
        finally:
            if self._stop.is_set():
                _close(self.iterator)
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _put(self, item: Item) -> None:
        with self._changed:
            self.num_made += 1
            if not self._stop.is_set():
                self._items.append(item)
                self._changed.notify_all()
                self.must_pause = self.is_pause(item)

    def _wait_until_needed(self) -> bool:
        """Waits until another item is needed; returns False after `close`."""
        with self._changed:
            if self.must_pause or len(self._items) >= _DEPTH:
                self._changed.wait_for(self._may_continue)
            return not self._stop.is_set()

    def _may_continue(self) -> bool:
        if self._stop.is_set():
            return True
        if self.must_pause:
            return self.num_requested > self.num_made
        return self._is_low()

    def _is_low(self) -> bool:
        return len(self._items) <= _DEPTH // 2


def _close(iterator: object) -> None:
    getattr(iterator, "close", lambda: None)()


class Rebatcher:
    """Regroups the rows of batches of any size into batches of other sizes."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self._parts = parts
        self._left: list[Tree] = []
        self._count = 0

    def take(self, count: int) -> Tree | None:
        """Returns the next `count` rows as one batch.

        Returns fewer rows at the end of the data, or if the rows after them
        have different shapes. Returns None if no rows are left.
        """
        # At least one row is read, so that the shapes are known.
        while self._count < max(count, 1):
            part = next(self._parts, None)
            if part is None:
                break
            if num_rows(part.data):
                self._left.append(part.data)
                self._count += part.rows
        if not self._count:
            return None
        parts, missing = [], count
        if missing == 0:
            return slice_rows(self._left[0], 0, 0)
        while missing and self._left:
            first = self._left[0]
            if parts and find_row_kind(parts[0]) != find_row_kind(first):
                # The rows have different shapes (for example, because they are
                # padded to another length), so they cannot be part of the same
                # batch.
                break
            rows = num_rows(first)
            if rows <= missing:
                parts.append(self._left.pop(0))
            else:
                parts.append(slice_rows(first, 0, missing))
                self._left[0] = slice_rows(first, missing, rows)
            num_used = min(rows, missing)
            missing -= num_used
            self._count -= num_used
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def peek(
    parts: Iterator[Part], count: int
) -> tuple[list[Part], Iterator[Part]]:
    """Returns the first `count` parts, and an iterator over all parts.

    If reading one of the first parts raises an error, the iterator raises it
    after the parts that precede it.
    """
    first: list[Part] = []
    try:
        first.extend(itertools.islice(parts, count))
    except Exception as error:
        return first, itertools.chain(first, _raise_later(error))
    return first, itertools.chain(first, parts)


def _raise_later(error: Exception) -> Iterator[Any]:
    raise error
    yield


def slice_rows(batch: Tree, start: int, stop: int | None) -> Tree:
    """Returns the rows of a batch from `start` up to `stop`."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)

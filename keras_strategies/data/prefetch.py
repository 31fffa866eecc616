"""A reader that prefetches in a thread."""

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_MEMORY_SHARE = 0.05
_MAX_DEPTH = 4
_LAST_ITEM_S = 5.0
# A thread's turn takes 0.2 ms, and what it makes meanwhile takes the consumer's
# time as well: items that take less than this are made by who asks for them.
_QUICK_S = 0.0005
# One that takes so long is not taken for a hiccup of the machine.
_SLOW_S = 0.005


class Prefetched(Generic[Item]):
    """An iterator whose items a thread makes ahead of time.

    An error of the iterator is raised where its item would have come. The
    thread ends with the iterator, or when this object is closed or collected.
    It starts with the first item, or when items turn out to be slow.

    Args:
      items: Makes them; where it waits, it asks `stop` whether to give up.
      stop: Set when this object is closed.
      num_bytes: Memory that an item holds; the more, the fewer are made ahead.
      is_pause: Whether to make the next item only when it is asked for: so
        nothing is read that may never be wanted.
      needs_thread: Whether quick items are made in the thread, too.
    """

    def __init__(
        self,
        items: Iterator[Item],
        stop: threading.Event,
        num_bytes: Callable[[Item], int],
        is_pause: Callable[[Item], bool],
        *,
        needs_thread: bool = True,
    ) -> None:
        self._buffer = _Buffer(items, stop, num_bytes, is_pause)
        self._thread = threading.Thread(
            target=self._buffer.fill,
            name="keras_strategies-prefetch",
            daemon=True,
        )
        self._is_quick = not needs_thread
        # How long an item takes, in seconds: a running mean.
        self._mean_s = 0.0

    def __iter__(self) -> "Prefetched[Item]":
        return self

    def __next__(self) -> Item:
        if self._is_quick:
            return self._made_here()
        if self._thread.ident is None:
            self._thread.start()
        return self._buffer.take()

    def _made_here(self) -> Item:
        """The next item, made in this thread; the others' by their time."""
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
        self._mean_s += 0.25 * (min(seconds, 2 * _QUICK_S) - self._mean_s)
        buffer.num_wanted += 1
        buffer.num_made += 1
        if seconds > _SLOW_S or self._mean_s > _QUICK_S:
            self._is_quick = False
            buffer.must_pause = buffer.is_pause(item)
            self._thread.start()
        return item

    def close(self) -> None:
        """Stops the thread; the iterator has ended.

        Waits a moment for the thread to be done with what it reads: it may be
        read by somebody else then.
        """
        self._buffer.close()
        is_waited_for = (
            self._thread.is_alive()
            and self._thread is not threading.current_thread()
            # Daemons do not run any more.
            and not sys.is_finalizing()
        )
        if is_waited_for:
            self._thread.join(_LAST_ITEM_S)
        if self._is_quick:
            _close(self._buffer.iterator)

    def __del__(self) -> None:
        # At Python's end threads are stopped, and modules' names are gone.
        if sys is not None and not sys.is_finalizing():
            self.close()


class _Buffer(Generic[Item]):
    """What the thread and its reader share; not the reader itself, so that
    it can be collected."""

    def __init__(
        self,
        iterator: Iterator[Item],
        stop: threading.Event,
        num_bytes: Callable[[Item], int],
        is_pause: Callable[[Item], bool],
    ) -> None:
        self.iterator = iterator
        self.is_pause = is_pause
        self.num_wanted = self.num_made = 0
        self.must_pause = self.is_over = False
        self._stop = stop
        self._num_bytes = num_bytes
        self._changed = threading.Condition()
        self._items: collections.deque[Item] = collections.deque()
        self._depth = 0  # Until the first item is measured.
        self._error: BaseException | None = None

    def take(self) -> Item:
        """Waits for the next item."""
        with self._changed:
            self.num_wanted += 1
            if not self._items:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self.is_over)
            if self._items:
                item = self._items.popleft()
                # Not for each item: a thread's turn takes as long as a batch.
                if self._is_low():
                    self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Has the thread stop; no item is left."""
        with self._changed:
            self._stop.set()
            self.is_over = True
            self._items.clear()
            self._changed.notify_all()

    def fill(self) -> None:
        """Makes the items, in the thread."""
        try:
            if not self._is_next_wanted():
                return
            for item in self.iterator:
                self._put(item)
                del item
                if not self._is_next_wanted():
                    return  # One more item might be read otherwise.
        except BaseException as error:  # Raised where the item is awaited.
            if not self._stop.is_set():  # Nobody waits then.
                self._error = error
        finally:
            if self._stop.is_set():
                _close(self.iterator)
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _put(self, item: Item) -> None:
        if not self._depth:
            self._depth = _depth(self._num_bytes(item))
        with self._changed:
            self.num_made += 1
            if not self._stop.is_set():
                self._items.append(item)
                self._changed.notify_all()
                self.must_pause = self.is_pause(item)

    def _is_next_wanted(self) -> bool:
        """Waits until another item is to be made; False if none is."""
        with self._changed:
            if self.must_pause or len(self._items) >= self._depth:
                self._changed.wait_for(self._may_continue)
            return not self._stop.is_set()

    def _may_continue(self) -> bool:
        if self._stop.is_set():
            return True
        if self.must_pause:
            return self.num_wanted > self.num_made
        return self._is_low()

    def _is_low(self) -> bool:
        return len(self._items) <= self._depth // 2


def _close(iterator: object) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def _depth(num_bytes: int) -> int:
    """How many items to hold, so that memory is left for others."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Not on this system.
        return 2
    fit = int(_MEMORY_SHARE * free / max(num_bytes, 1))
    return min(max(fit, 1), _MAX_DEPTH)

"""A reader that prefetches in a thread."""

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_MEMORY_SHARE = 0.05
_MAX_DEPTH = 4
_LAST_ITEM_S = 5.0
# A thread's turn takes 0.2 ms, and what it makes meanwhile takes the consumer's
# time as well: items that take less than this are made by who asks for them.
_QUICK_S = 0.0005
# One that takes so long is not taken for a hiccup of the machine.
_SLOW_S = 0.005


class Stop:
    """Whether to stop: asked by an iterator that is made before its thread.

    Attributes:
      asks: Tells it; nobody stops before that is set.
    """

    asks: Callable[[], bool] | None = None

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.asks is not None and self.asks()


class Prefetched(Generic[Item]):
    """An iterator whose items a thread makes ahead of time.

    An error of the iterator is raised where its item would have come. The
    thread ends with the iterator, or when this object is closed or collected.
    It starts with the first item, or when items turn out to be slow.

    Args:
      make: Called with a function that returns whether to stop; returns the
        iterator.
      num_bytes: Memory that an item holds; the more, the fewer are made ahead.
      is_pause: Whether to make the next item only when it is asked for: so
        nothing is read that may never be wanted.
      needs_thread: Whether quick items are made in the thread, too.
    """

    def __init__(
        self,
        make: Callable[[Callable[[], bool]], Iterator[Item]],
        num_bytes: Callable[[Item], int],
        is_pause: Callable[[Item], bool],
        *,
        needs_thread: bool = True,
    ) -> None:
        self._shared: _Shared[Item] = _Shared()
        self._thread = threading.Thread(
            target=_read,
            args=(self._shared, make, num_bytes, is_pause),
            name="keras_strategies-prefetch",
            daemon=True,
        )
        self._make = make
        self._is_pause = is_pause
        self._is_started = False
        self._is_quick = not needs_thread
        # How long an item takes, in seconds: a running mean.
        self._mean_s = 0.0

    def __iter__(self) -> "Prefetched[Item]":
        return self

    def __next__(self) -> Item:
        shared = self._shared
        if self._is_quick:
            return self._made_here()
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        with shared.changed:
            shared.num_wanted += 1
            if not shared.items:
                shared.changed.notify_all()
                shared.changed.wait_for(lambda: shared.items or shared.is_over)
            if shared.items:
                item = shared.items.popleft()
                # Not for each item: a thread's turn takes as long as a batch.
                if len(shared.items) <= shared.num_low:
                    shared.changed.notify_all()
                return item
            error, shared.error = shared.error, None
        if error is not None:
            raise error
        raise StopIteration

    def _made_here(self) -> Item:
        """The next item, made in this thread; the others' by their time."""
        shared = self._shared
        if shared.is_over:
            raise StopIteration
        start = time.perf_counter()
        try:
            if shared.iterator is None:
                shared.iterator = self._make(lambda: shared.is_closed)
            item = next(shared.iterator)
        except BaseException:
            shared.is_over = True
            raise
        seconds = time.perf_counter() - start
        self._mean_s += 0.25 * (min(seconds, 2 * _QUICK_S) - self._mean_s)
        shared.num_wanted += 1
        shared.num_made += 1
        if seconds > _SLOW_S or self._mean_s > _QUICK_S:
            self._is_quick = False
            self._is_started = True
            shared.must_pause = self._is_pause(item)
            self._thread.start()
        return item

    def close(self) -> None:
        """Stops the thread; the iterator has ended.

        Waits a moment for the thread to be done with what it reads: it may be
        read by somebody else then.
        """
        with self._shared.changed:
            self._shared.is_closed = True
            self._shared.is_over = True
            self._shared.items.clear()
            self._shared.changed.notify_all()
        is_waited_for = (
            self._thread.is_alive()
            and self._thread is not threading.current_thread()
            # Daemons do not run any more.
            and not sys.is_finalizing()
        )
        if is_waited_for:
            self._thread.join(_LAST_ITEM_S)
        if self._is_quick:
            _close(self._shared.iterator)

    def __del__(self) -> None:
        # At Python's end threads are stopped, and modules' names are gone.
        if sys is not None and not sys.is_finalizing():
            self.close()


class _Shared(Generic[Item]):
    """What the thread and its reader share; not the reader itself, so that
    it can be collected."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: collections.deque[Item] = collections.deque()
        # None before the first item.
        self.iterator: Iterator[Item] | None = None
        self.num_wanted = 0
        self.num_made = 0
        self.must_pause = False
        # Items left when the thread makes more.
        self.num_low = 0
        self.is_over = False
        self.is_closed = False
        self.error: BaseException | None = None


def _read(
    shared: "_Shared[Any]",
    make: Callable[[Callable[[], bool]], Iterator[Any]],
    num_bytes: Callable[[Any], int],
    is_pause: Callable[[Any], bool],
) -> None:
    depth = 0  # Until the first item is measured.

    def may_continue() -> bool:
        if shared.is_closed:
            return True
        if shared.must_pause:
            return shared.num_wanted > shared.num_made
        return len(shared.items) <= shared.num_low

    try:
        if shared.iterator is None:
            shared.iterator = make(lambda: shared.is_closed)
        with shared.changed:
            shared.changed.wait_for(may_continue)
        if shared.is_closed:
            return
        for item in shared.iterator:
            if not depth:
                depth = _depth(num_bytes(item))
                shared.num_low = depth // 2
            shared.num_made += 1
            with shared.changed:
                if shared.is_closed:
                    return
                shared.items.append(item)
                shared.changed.notify_all()
                shared.must_pause = is_pause(item)
                del item
                if shared.must_pause or len(shared.items) >= depth:
                    shared.changed.wait_for(may_continue)
                if shared.is_closed:
                    return  # One more item might be read otherwise.
    except BaseException as error:  # Raised again where the item is awaited.
        if not shared.is_closed:  # Nobody waits then.
            shared.error = error
    finally:
        if shared.is_closed:
            _close(shared.iterator)
        with shared.changed:
            shared.is_over = True
            shared.changed.notify_all()


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

"""Counts the programs that JAX compiles, their seconds and their causes."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator

import jax

_PREFIX = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MAX_CAUSES = 100
_MAX_LENGTH = 200
_OTHERS = "other programs"


class Compilations:
    """A listener to the compilations of one thread.

    Args:
      find_cause: A function that returns why a program is compiled now, given
        the program's name; None if the event is not counted.
      note_seconds: A function that is called with the seconds of each event,
        without those that it was called with before.
      clock: A function that returns the time in seconds.

    Attributes:
      counts: Number of compiled programs by their causes.
      seconds: Seconds of tracing, lowering and compiling by the same causes.
    """

    def __init__(
        self,
        find_cause: Callable[[str], str | None],
        note_seconds: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._find_cause, self._clock = find_cause, clock
        self._note_seconds = note_seconds
        self._thread = threading.get_ident()
        self.counts = collections.Counter[str]()
        self.seconds: dict[str, float] = {}
        # Tracing a program traces the programs that it calls: of the latest
        # events, the times when they began, and their seconds.
        self._nested: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to JAX's events while the block runs."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(
        self, event: str, duration_secs: float, **kwargs: str | int
    ) -> None:
        is_ours = threading.get_ident() == self._thread
        if not is_ours or not event.startswith(_PREFIX):
            return
        name = self._find_cause(str(kwargs.get("fun_name", "a program")))
        if name is None:
            return
        began, new = self._clock() - duration_secs, duration_secs
        while self._nested and self._nested[-1][0] >= began:
            new -= self._nested.pop()[1]
        self._nested = [*self._nested[-_MAX_CAUSES:], (began, duration_secs)]
        if len(name) > _MAX_LENGTH:
            # A batch may have hundreds of arrays.
            name = f"{name[:_MAX_LENGTH]}..."
        if len(self.seconds) >= _MAX_CAUSES and name not in self.seconds:
            name = _OTHERS
        self.counts[name] += event == _COMPILED
        new = max(new, 0.0)
        self.seconds[name] = self.seconds.get(name, 0.0) + new
        self._note_seconds(new)

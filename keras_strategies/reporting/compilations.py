"""Counts the programs that JAX compiles, their seconds and their causes."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import jax

_PREFIX = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MOST = 100
_OTHERS = "other programs"


@dataclasses.dataclass(kw_only=True)
class Cause:
    """The programs that were compiled for one reason.

    Attributes:
      count: Number of programs.
      seconds: Seconds of tracing, lowering and compiling.
    """

    count: int = 0
    seconds: float = 0.0


class Compilations:
    """A listener to the compilations of one thread.

    Args:
      find_cause: A function that returns why a program is compiled now, given
        the program's name.
      note_seconds: A function that is called with the seconds of each event,
        without those that it was called with before.
      clock: A function that returns the time in seconds.

    Attributes:
      causes: The compilations by their causes.
      seconds: Seconds of tracing, lowering and compiling in all.
      is_paused: Whether events are ignored.
    """

    def __init__(
        self,
        find_cause: Callable[[str], str],
        note_seconds: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._find_cause, self._clock = find_cause, clock
        self._note_seconds = note_seconds
        self._thread = threading.get_ident()
        self.causes: dict[str, Cause] = {}
        self.seconds = 0.0
        self.is_paused = False
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
        is_ours = threading.get_ident() == self._thread and not self.is_paused
        if not is_ours or not event.startswith(_PREFIX):
            return
        began, new = self._clock() - duration_secs, duration_secs
        while self._nested and self._nested[-1][0] >= began:
            new -= self._nested.pop()[1]
        self._nested = [*self._nested[-_MOST:], (began, duration_secs)]
        name = self._find_cause(str(kwargs.get("fun_name", "a program")))
        if len(self.causes) >= _MOST and name not in self.causes:
            name = _OTHERS
        cause = self.causes.setdefault(name, Cause())
        cause.count += event == _COMPILED
        cause.seconds += max(new, 0.0)
        self.seconds += max(new, 0.0)
        self._note_seconds(max(new, 0.0))

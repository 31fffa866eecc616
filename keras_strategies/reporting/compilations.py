"""The programs that JAX compiles, and the shapes of batches that cause them."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies.spmd.batches import Segment

_PREFIX = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MAX_CAUSES = 100
_MAX_LENGTH = 200
_OTHERS = "other programs"
_ENTRIES = ("x", "y", "sample_weight")

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a segment's arrays, with the padding."""


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


@dataclasses.dataclass(kw_only=True)
class ShapeCount:
    """The batches of one shape that were trained on.

    Attributes:
      text: The arrays' shapes by their names, with all rows of a batch.
      rows: Number of rows of a batch, without padding.
      tokens: Number of tokens of a batch; 0 if it contains none.
      x: The shapes and dtypes of the inputs, with all rows of a batch.
      steps: Number of steps.
    """

    text: dict[str, tuple[int, ...]]
    rows: int
    tokens: int
    x: Any = None
    steps: int = 0


def sign(segment: Segment) -> Signature:
    """Returns the shapes of a segment's arrays, in a fixed order."""
    try:
        # `data` is usually a tuple of arrays.
        shapes = [leaf.shape for leaf in segment.data]
    except AttributeError:
        shapes = [leaf.shape for leaf in jax.tree.leaves(segment.data)]
    return (*shapes, (segment.rows, segment.steps))


def describe(segment: Segment, *, has_tokens: bool) -> ShapeCount:
    """Describes the shapes of a segment's batches.

    Args:
      segment: The segment.
      has_tokens: Whether the model's integer inputs are sequences of tokens.
    """
    data = segment.data if isinstance(segment.data, tuple) else (segment.data,)
    first = 2 if segment.steps > 1 else 1
    named = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (segment.rows, *leaf.shape[first:]), leaf.dtype
        ),
        dict(zip(_ENTRIES, data, strict=False)),
    )
    lengths = [
        leaf.shape[1]
        for leaf in jax.tree.leaves(named["x"])
        if has_tokens
        and len(leaf.shape) == 2
        and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
    ]
    longest = max(lengths, default=0)
    return ShapeCount(
        text={
            path[0].key + jax.tree_util.keystr(path[1:]): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(named)
        },
        rows=segment.rows,
        tokens=segment.rows * longest if longest > 1 else 0,
        x=named["x"],
    )


def describe_change(new: ShapeCount, known: list[ShapeCount]) -> str:
    """Describes how a batch's shapes differ from those of earlier batches.

    Returns "" if they do not differ, but the number of steps of a program does.
    """
    if new.text in [one.text for one in known]:
        return ""
    first = known[0].text if known else {}
    changed = {n: s for n, s in new.text.items() if s != first.get(n)}
    return ", ".join(f"{name} {shape}" for name, shape in changed.items())

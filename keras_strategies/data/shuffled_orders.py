"""The shuffled orders of epochs: a function of a seed and the epoch.

They are those that Keras would draw: so a run is shuffled as plain Keras
shuffles it, every process can be sent the seed, and an interrupted run finds
its order again. Keras 3.15 draws them one after the other from the random
state that a loop finds when it starts: that is the seed. Keras 3.16 draws each
from the epoch's number alone.
"""

import abc
import base64
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class Order(abc.ABC):
    """An order for each pass over the data."""

    @property
    @abc.abstractmethod
    def seed(self) -> str:
        """What the orders are drawn from, as text."""

    @abc.abstractmethod
    def restart(self, seed: str) -> None:
        """Takes the orders of another seed.

        Args:
          seed: What `seed` of another order returned.

        Raises:
          ValueError: it is no seed of this kind of order.
        """

    @abc.abstractmethod
    def skip(self) -> None:
        """Does what an iterator does that Keras makes to build a model on."""

    @abc.abstractmethod
    def of(self, epoch: int) -> np.ndarray:
        """The order of an epoch: indices, shape (size,).

        Args:
          epoch: The number of a pass over the data, from 0.
        """

    def resize(self, size: int) -> None:
        """Takes orders of another number of batches from now on.

        Args:
          size: The number.
        """
        del size

    def lasts(self, epochs: int) -> None:
        """Says how many of a loop's epochs a pass over the data lasts for."""
        del epochs


class DrawnOrder(Order):
    """Orders drawn from one of the global random generators.

    Args:
      seed: What `seed` of another order returned, to have its orders; the
        generator's present state if left out.
    """

    def __init__(self, seed: str | None = None) -> None:
        self.restart(self._global() if seed is None else seed)

    @property
    def seed(self) -> str:
        """The state that the orders are drawn from, as text."""
        return self._seed

    def restart(self, seed: str) -> None:
        """See `Order.restart`."""
        self._parsed(seed)
        self._seed = seed
        self._state = seed
        self._epoch = 0
        self._last: tuple[int, np.ndarray] | None = None

    def skip(self) -> None:
        """Makes the second order the first one."""
        self.of(0)
        self.restart(self._state)

    def of(self, epoch: int) -> np.ndarray:
        """See `Order.of`.

        Moves the global generator on, as drawing from it would, unless
        somebody else has used it meanwhile.
        """
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        if epoch < self._epoch:
            self._state, self._epoch = self._seed, 0
        order = np.zeros(0, int)
        while self._epoch <= epoch:
            before = self._state
            order, self._state = self._draw(before)
            if self._global() == before:
                self._set_global(self._state)
            self._epoch += 1
        self._last = (epoch, order)
        return order

    @abc.abstractmethod
    def _parsed(self, state: str) -> tuple[Any, ...]:
        """A state as its generator has it; raises ValueError for another's."""

    @abc.abstractmethod
    def _draw(self, state: str) -> tuple[np.ndarray, str]:
        """One order and the state after it."""

    @abc.abstractmethod
    def _global(self) -> str:
        """The global generator's state."""

    @abc.abstractmethod
    def _set_global(self, state: str) -> None:
        """Sets it."""


class RowOrder(DrawnOrder):
    """Orders of rows, drawn as Keras does for arrays, with numpy.

    Args:
      rows: Number of rows.
      window: Rows of a batch where only the rows of each are shuffled, or
        None.
      seed: See `DrawnOrder`.
    """

    def __init__(
        self, rows: int, window: int | None = None, seed: str | None = None
    ) -> None:
        self._rows = rows
        self._window = window
        super().__init__(seed)

    def _parsed(self, state: str) -> tuple[Any, ...]:
        return _numpy_state(state)

    def _draw(self, state: str) -> tuple[np.ndarray, str]:
        generator = np.random.RandomState()
        generator.set_state(_numpy_state(state))

        def permuted(_: int, rows: int) -> np.ndarray:
            return generator.permutation(rows)

        order = _in_windows(self._rows, self._window, permuted)
        return order, _text(generator.get_state(legacy=True))

    def _global(self) -> str:
        return _text(np.random.get_state(legacy=True))

    def _set_global(self, state: str) -> None:
        np.random.set_state(_numpy_state(state))


class BatchOrder(DrawnOrder):
    """Orders of batches, drawn as Keras does, with Python's generator.

    Args:
      size: Number of batches.
      seed: See `DrawnOrder`.
    """

    def __init__(self, size: int, seed: str | None = None) -> None:
        self._size = size
        super().__init__(seed)

    def resize(self, size: int) -> None:
        """See `Order.resize`."""
        if size != self._size:
            self._size = size
            self._last = None

    def _parsed(self, state: str) -> tuple[Any, ...]:
        return _python_state(state)

    def _draw(self, state: str) -> tuple[np.ndarray, str]:
        generator = random.Random()
        generator.setstate(_python_state(state))
        order = _shuffled(self._size, generator)
        return order, _python_text(generator.getstate())

    def _global(self) -> str:
        return _python_text(random.getstate())

    def _set_global(self, state: str) -> None:
        random.setstate(_python_state(state))


class NumberedOrder(Order):
    """Orders drawn from the number of an epoch alone, as Keras 3.16 does.

    A fit's first epoch has the number 1. Where a pass over the data lasts for
    several epochs it has the number of the one that it begins in.
    """

    _of = ""  # What is shuffled: orders of rows are no orders of batches.

    def __init__(self) -> None:
        self._epochs = 1

    @property
    def seed(self) -> str:
        """See `Order.seed`."""
        return f"{self._of} by number:{self._epochs}"

    def restart(self, seed: str) -> None:
        """See `Order.restart`."""
        kind, _, epochs = seed.partition(":")
        is_ours = kind == f"{self._of} by number"
        if not is_ours or not re.fullmatch("[1-9][0-9]{0,9}", epochs):
            raise ValueError(
                f"Orders of {self._of} by number resume from such a seed. "
                "Received: that of other data, or a random state, as Keras "
                "3.15 draws orders from. Resume with the data, and the "
                "version of Keras, that the run began with."
            )
        self._epochs = int(epochs)

    def skip(self) -> None:
        """Building a model draws nothing."""

    def lasts(self, epochs: int) -> None:
        """See `Order.lasts`."""
        self._epochs = epochs

    def of(self, epoch: int) -> np.ndarray:
        """See `Order.of`."""
        return self._draw(1 + epoch * self._epochs)

    @abc.abstractmethod
    def _draw(self, number: int) -> np.ndarray:
        """The order with a number."""


class NumberedRowOrder(NumberedOrder):
    """As `RowOrder`, of Keras 3.16."""

    _of = "rows"

    def __init__(self, rows: int, window: int | None = None) -> None:
        super().__init__()
        self._rows = rows
        self._window = window

    def _draw(self, number: int) -> np.ndarray:
        def permuted(window: int, rows: int) -> np.ndarray:
            return np.random.default_rng(number + window).permutation(rows)

        return _in_windows(self._rows, self._window, permuted)


class NumberedBatchOrder(NumberedOrder):
    """As `BatchOrder`, of Keras 3.16."""

    _of = "batches"

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def resize(self, size: int) -> None:
        """See `Order.resize`."""
        self._size = size

    def _draw(self, number: int) -> np.ndarray:
        return _shuffled(self._size, random.Random(number))


def _in_windows(
    rows: int, size: int | None, permuted: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """An order of rows, or of those of each window among themselves.

    Args:
      rows: Number of rows.
      size: Rows of a window; None for one window of all.
      permuted: Makes the order of a window, of its number and its rows.
    """
    if size is None:
        return permuted(0, rows)
    starts = range(0, rows, size)
    return np.concatenate(
        [permuted(i, min(size, rows - s)) + s for i, s in enumerate(starts)]
    )


def _shuffled(size: int, generator: random.Random) -> np.ndarray:
    order = list(range(size))
    generator.shuffle(order)
    return np.array(order, int)


# Both generators are Mersenne Twisters: 624 words and a position; numpy's
# has a spare Gaussian besides. A seed may come from a file.
_NUM_WORDS = 624
_PYTHONS = 3


def _packed(words: npt.ArrayLike, *others: object) -> str:
    raw = np.asarray(words, "<u4").tobytes()
    text = base64.b64encode(raw).decode("ascii")
    return ":".join([text, *map(repr, others)])


def _words(text: str, count: int) -> np.ndarray:
    words = np.frombuffer(base64.b64decode(text, validate=True), "<u4")
    if len(words) != count:
        raise ValueError(f"A generator has {count} words.")
    return words


def _position(text: str) -> int:
    # Neither numpy nor its C code looks whether it lies within the words.
    position = int(text)
    if not 0 <= position <= _NUM_WORDS:
        raise ValueError(f"A generator's position is to {_NUM_WORDS}.")
    return position


def _text(state: Any) -> str:
    _, words, position, has_spare, spare = state
    return _packed(words, int(position), int(has_spare), float(spare))


def _numpy_state(text: str) -> tuple[Any, ...]:
    words, position, has_spare, spare = text.split(":")
    return (
        "MT19937",
        _words(words, _NUM_WORDS),
        _position(position),
        int(has_spare == "1"),
        float(spare),
    )


def _python_text(state: tuple[Any, ...]) -> str:
    version, words, spare = state
    return _packed(words, int(version), spare)


def _python_state(text: str) -> tuple[Any, ...]:
    words, version, spare = text.split(":")
    numbers = tuple(map(int, _words(words, _NUM_WORDS + 1)))
    _position(str(numbers[-1]))
    if int(version) != _PYTHONS:
        raise ValueError(f"Python's generator has version {_PYTHONS}.")
    return _PYTHONS, numbers, None if spare == "None" else float(spare)

"""The shuffle order of each epoch, as a function of a seed and the epoch.

The orders are the same as in plain Keras. Because they depend only on the seed
and the epoch, the seed can be sent to every process, and an interrupted run can
compute its orders again. Keras 3.15 generates the orders one after the other
from the state that the global random generator has when `fit` starts; here that
state is the seed. Keras 3.16 generates each order from the epoch's number only.
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
    """The shuffle orders of all passes over the data, one for each pass."""

    @property
    @abc.abstractmethod
    def seed(self) -> str:
        """The seed that determines the shuffle orders, as text."""

    @abc.abstractmethod
    def restart(self, seed: str) -> None:
        """Switches to the shuffle orders that another seed determines.

        Args:
          seed: The value of `seed` of another `Order` object.

        Raises:
          ValueError: if `seed` comes from another kind of `Order`.
        """

    @abc.abstractmethod
    def skip(self) -> None:
        """Skips the shuffle order that Keras uses while it builds a model.

        To build a model, Keras creates an extra iterator, which may use up an
        order.
        """

    @abc.abstractmethod
    def compute(self, epoch: int) -> np.ndarray:
        """Computes the order of an epoch, an array of indices of shape (size,).

        Args:
          epoch: Number of the pass over the data, from 0.
        """

    def resize(self, size: int) -> None:
        """Sets the number of batches that each order contains.

        Args:
          size: The new number of batches.
        """
        del size

    def set_epochs_per_pass(self, epochs: int) -> None:
        """Sets how many epochs of `fit` one pass over the data covers."""
        del epochs


class DrawnOrder(Order):
    """Shuffle orders generated with numpy's or Python's global generator.

    Args:
      seed: The value of `seed` of another `DrawnOrder`, to get the same orders
        as that object; None for the current state of the global generator.
    """

    def __init__(self, seed: str | None = None) -> None:
        self.restart(self._save(self._shared) if seed is None else seed)

    @property
    def seed(self) -> str:
        """The generator state that produces the orders, as text."""
        return self._seed

    def restart(self, seed: str) -> None:
        """See `Order.restart`."""
        self._load(seed)
        self._seed = seed
        self._state = seed
        self._epoch = 0
        self._last: tuple[int, np.ndarray] | None = None

    def skip(self) -> None:
        """Drops the first order, so that the second becomes the first."""
        self.compute(0)
        self.restart(self._state)

    def compute(self, epoch: int) -> np.ndarray:
        """See `Order.compute`.

        Also advances the global generator, as if the order had been generated
        with it, unless other code has used it since the previous order.
        """
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        if epoch < self._epoch:
            self._state, self._epoch = self._seed, 0
        order = np.zeros(0, int)
        while self._epoch <= epoch:
            generator, before = self._load(self._state), self._state
            order, self._state = self._shuffle(generator), self._save(generator)
            if self._save(self._shared) == before:
                self._load(self._state, self._shared)
            self._epoch += 1
        self._last = (epoch, order)
        return order

    # The module whose functions use the global generator.
    _shared: Any

    @abc.abstractmethod
    def _load(self, state: str, generator: Any = None) -> Any:
        """Returns a generator in a state; raises ValueError if malformed.

        A new generator is made if `generator` is None.
        """

    @abc.abstractmethod
    def _save(self, generator: Any) -> str:
        """Returns a generator's state."""

    @abc.abstractmethod
    def _shuffle(self, generator: Any) -> np.ndarray:
        """Generates one order."""


class RowOrder(DrawnOrder):
    """Shuffled row orders, generated with numpy as Keras does for arrays.

    Args:
      rows: Number of rows.
      window: The batch size if rows are shuffled only within their batch; None
        if all rows are shuffled together.
      seed: See `DrawnOrder`.
    """

    _shared = np.random

    def __init__(
        self, rows: int, window: int | None = None, seed: str | None = None
    ) -> None:
        self._rows = rows
        self._window = window
        super().__init__(seed)

    def _load(self, state: str, generator: Any = None) -> Any:
        generator = generator or np.random.RandomState()
        generator.set_state(_parse_numpy_state(state))
        return generator

    def _save(self, generator: Any) -> str:
        return _format_numpy_state(generator.get_state(legacy=True))

    def _shuffle(self, generator: Any) -> np.ndarray:
        def permute(_: int, rows: int) -> np.ndarray:
            return generator.permutation(rows)

        return _permute_windows(self._rows, self._window, permute)


class BatchOrder(DrawnOrder):
    """Shuffled batch orders, generated with Python's `random` as in Keras.

    Args:
      size: Number of batches.
      seed: See `DrawnOrder`.
    """

    _shared = random

    def __init__(self, size: int, seed: str | None = None) -> None:
        self._size = size
        super().__init__(seed)

    def resize(self, size: int) -> None:
        """See `Order.resize`."""
        if size != self._size:
            self._size = size
            self._last = None

    def _load(self, state: str, generator: Any = None) -> Any:
        generator = generator or random.Random()
        generator.setstate(_parse_python_state(state))
        return generator

    def _save(self, generator: Any) -> str:
        return _format_python_state(generator.getstate())

    def _shuffle(self, generator: Any) -> np.ndarray:
        return _shuffle(self._size, generator)


class NumberedOrder(Order):
    """Shuffle orders that depend only on an epoch's number, as in Keras 3.16.

    The first epoch of a fit has the number 1. If one pass over the data covers
    several epochs, its order is that of the first of these epochs.
    """

    # "rows" or "batches". A seed for rows cannot be used for batches.
    _unit = ""

    def __init__(self) -> None:
        self._epochs = 1

    @property
    def seed(self) -> str:
        """See `Order.seed`."""
        return f"{self._unit} by number:{self._epochs}"

    def restart(self, seed: str) -> None:
        """See `Order.restart`."""
        kind, _, epochs = seed.partition(":")
        is_ours = kind == f"{self._unit} by number"
        if not is_ours or not re.fullmatch("[1-9][0-9]{0,9}", epochs):
            raise ValueError(
                f"With Keras 3.16, shuffling of {self._unit} must resume from "
                "a seed that Keras 3.16 saved with the same data, not 3.15. "
                "Resume with the data and Keras that the run started with."
            )
        self._epochs = int(epochs)

    def skip(self) -> None:
        """Does nothing: building a model uses up no shuffle order."""

    def set_epochs_per_pass(self, epochs: int) -> None:
        """See `Order.set_epochs_per_pass`."""
        self._epochs = epochs

    def compute(self, epoch: int) -> np.ndarray:
        """See `Order.compute`."""
        return self._draw(1 + epoch * self._epochs)

    @abc.abstractmethod
    def _draw(self, number: int) -> np.ndarray:
        """Returns the order of the epoch with the given number."""


class NumberedRowOrder(NumberedOrder):
    """Shuffled row orders, the same as those of Keras 3.16."""

    _unit = "rows"

    def __init__(self, rows: int, window: int | None = None) -> None:
        super().__init__()
        self._rows = rows
        self._window = window

    def _draw(self, number: int) -> np.ndarray:
        def permute(window: int, rows: int) -> np.ndarray:
            return np.random.default_rng(number + window).permutation(rows)

        return _permute_windows(self._rows, self._window, permute)


class NumberedBatchOrder(NumberedOrder):
    """Shuffled batch orders, the same as those of Keras 3.16."""

    _unit = "batches"

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def resize(self, size: int) -> None:
        """See `Order.resize`."""
        self._size = size

    def _draw(self, number: int) -> np.ndarray:
        return _shuffle(self._size, random.Random(number))


def _permute_windows(
    rows: int, size: int | None, permute: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """Returns a shuffle order that keeps each row within its window.

    Args:
      rows: Number of rows.
      size: Number of rows in a window; None for a single window that contains
        all rows.
      permute: A function that is called with a window's index and its number of
        rows, and returns the shuffle order within the window.
    """
    if size is None:
        return permute(0, rows)
    starts = range(0, rows, size)
    return np.concatenate(
        [permute(i, min(size, rows - s)) + s for i, s in enumerate(starts)]
    )


def _shuffle(size: int, generator: random.Random) -> np.ndarray:
    order = list(range(size))
    generator.shuffle(order)
    return np.array(order, int)


# Both generators are Mersenne Twisters. Their state consists of 624 words, a
# position and a cached Gaussian value. A seed may come from a file, so each of
# these is checked.
_NUM_WORDS = 624
_PYTHONS = 3


def _pack(words: npt.ArrayLike, *others: object) -> str:
    raw = np.asarray(words, "<u4").tobytes()
    text = base64.b64encode(raw).decode("ascii")
    return ":".join([text, *map(repr, others)])


def _parse_words(text: str, count: int) -> np.ndarray:
    words = np.frombuffer(base64.b64decode(text, validate=True), "<u4")
    if len(words) != count:
        raise ValueError(f"A generator state must have {count} words.")
    return words


def _check_position(text: str) -> int:
    # Neither numpy nor its C code checks that the position is in range.
    position = int(text)
    if not 0 <= position <= _NUM_WORDS:
        raise ValueError(f"A position must be between 0 and {_NUM_WORDS}.")
    return position


def _format_numpy_state(state: Any) -> str:
    _, words, position, has_spare, spare = state
    return _pack(words, int(position), int(has_spare), float(spare))


def _parse_numpy_state(text: str) -> tuple[Any, ...]:
    words, position, has_spare, spare = text.split(":")
    return (
        "MT19937",
        _parse_words(words, _NUM_WORDS),
        _check_position(position),
        int(has_spare == "1"),
        float(spare),
    )


def _format_python_state(state: tuple[Any, ...]) -> str:
    version, words, spare = state
    return _pack(words, int(version), spare)


def _parse_python_state(text: str) -> tuple[Any, ...]:
    words, version, spare = text.split(":")
    numbers = tuple(map(int, _parse_words(words, _NUM_WORDS + 1)))
    _check_position(str(numbers[-1]))
    if int(version) != _PYTHONS:
        raise ValueError(f"The state must have version {_PYTHONS}.")
    return _PYTHONS, numbers, None if spare == "None" else float(spare)

"""A replacement for `tf.function` around whole steps or epochs."""

from collections.abc import Callable
from typing import Any


def function(
    fn: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Replaces `tf.function` around loops that call `run`; compiles nothing.

    `run` already compiles its function once, even if the function is created
    again for each call, and the host prepares the next batch while the devices
    work. So the Python code of `fn` runs at each call: prints, file writes and
    other side effects happen every time, not only in a first trace.

    Args:
      fn: The function. If it is omitted, a decorator is returned.
      **options: Not used: the options of `tf.function` concern graphs, which
        do not exist here.

    Returns:
      `fn`.

    Example:
      ```python
      @ks.function
      def train_epoch(dataset):
          total = 0.0
          for batch in dataset:
              losses = strategy.run(step, args=(batch,))
              total += strategy.reduce("sum", losses, axis=None)
          return total

      data = strategy.experimental_distribute_dataset(dataset)
      print(train_epoch(data))
      ```
    """
    del options
    return function if fn is None else fn

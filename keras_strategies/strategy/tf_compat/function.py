"""A replacement for `tf.function` around whole steps or epochs."""

import functools
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
      **options: Must be empty: the options of `tf.function` concern graphs,
        which do not exist here.

    Returns:
      A function that calls `fn`.

    Raises:
      TypeError: if options are passed, or `fn` is not callable.

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
    if options:
        raise TypeError(
            "`function` accepts no options, because it builds no graph. "
            f"Received: {', '.join(sorted(options))}. Remove the options; "
            "`run` compiles once for each shape of its arguments."
        )
    if fn is None:
        return function
    if not callable(fn):
        raise TypeError(
            "`function` must decorate a function. Received: an object of type "
            f"{type(fn).__name__}. Write `@ks.function` above a `def`."
        )

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call

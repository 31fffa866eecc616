"""One of a model's equal blocks, as the body of a loop over the blocks."""

from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from keras_strategies.hooks.on_read import is_on_read
from keras_strategies.hooks.variable_writes import is_user_defined
from keras_strategies.hooks.variables_used import InnerScope
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.kernels.block_calls import BlockCalls
from keras_strategies.spmd.identity import IdentitySet


class NotScanned(Exception):
    """Raised if a loop cannot compute blocks."""


class BlockBody:
    """One of the blocks, as the body of a loop.

    Args:
      calls: The recorded calls of the blocks.
      number: The block's number.
      variables: The block's variables.

    Attributes:
      written: The variables that the last call wrote.
    """

    def __init__(
        self, calls: BlockCalls, number: int, variables: list[keras.Variable]
    ) -> None:
        self._calls = calls
        self._number = number
        self._variables = variables
        self.written = IdentitySet()

    def compute(self, carry: Any, values: list[Any]) -> tuple[Any, list[Any]]:
        """Computes the block.

        Args:
          carry: The input, and its mask or None.
          values: The values of the block's variables.

        Returns:
          The output and its mask or None, and the values that were written to
          variables.

        Raises:
          NotScanned: if the block cannot be the body of a loop.
        """
        value, mask = carry
        if mask is not None:
            set_keras_mask(value, mask)
        with InnerScope(zip(self._variables, values, strict=True)) as inner:
            num_losses = len(inner.losses)
            output = self._calls.compute(self._number, value)
        if len(inner.losses) > num_losses:
            self._forget(inner.losses[num_losses:])
            raise NotScanned("a block adds a loss")
        new_carry = output, get_keras_mask(output)
        if describe_carry(new_carry) != describe_carry(carry):
            raise NotScanned(
                "the output of a block, or its mask, has another shape or "
                "dtype than the block's input"
            )
        written = [v for v in self._variables if v in inner.written]
        if len(written) < len(inner.written):
            raise NotScanned("blocks write a variable that they share")
        if not all(map(_is_plain, written)):
            raise NotScanned("a block writes a variable of its own")
        self.written = IdentitySet(written)
        return new_carry, [inner.get_current_value(v) for v in written]

    def _forget(self, losses: list[Any]) -> None:
        """Clears the ids of losses that an aborted trace added."""
        ids = set(map(id, losses))
        for operation in self._calls.blocks.segments[self._number]:
            if isinstance(operation, keras.Layer):
                for layer in operation._flatten_layers():
                    layer._loss_ids.difference_update(ids)


def _is_plain(variable: keras.Variable) -> bool:
    """Returns whether no rule combines what replicas write to a variable."""
    step = current_step()
    rules = () if step is None else step.notes.metric_rules
    return not (
        is_user_defined(variable)
        or is_on_read(variable)
        or hasattr(variable, "_ks_merge")
        or variable in rules
    )


def describe_carry(carry: Any) -> list[Any]:
    """Returns the shapes and dtypes of a value and its mask, or None."""
    return [None if x is None else (x.shape, str(x.dtype)) for x in carry]

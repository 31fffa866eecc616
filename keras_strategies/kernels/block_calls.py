"""Records the calls of equal blocks, to compute them later.

An operation's outputs are represented by tokens until a block is computed. A
run of blocks can be computed one by one, or each block for any input.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from keras_strategies._types import Array, Tree
from keras_strategies.kernels.equal_blocks import Blocks


class Token:
    """Stands for the input of a block, or an output of a recorded call.

    Attributes:
      value: Its value, or None while it is not computed.
    """

    value: Any = None


def resolve(nest: Tree) -> Any:
    """Replaces the tokens in a nest by their values, if they are computed.

    Returns:
      The nest, which contains tokens only where no value is known.
    """

    def value_of(leaf: Any) -> Any:
        is_known = isinstance(leaf, Token) and leaf.value is not None
        return leaf.value if is_known else leaf

    return tree.map_structure(value_of, nest)


def flatten(nest: Tree) -> list[Any]:
    """Returns the leaves of a nest."""
    return list(tree.flatten(nest) or ())


class _Call:
    """A recorded call of an operation.

    Attributes:
      operation: The operation.
      arguments: Its positional and keyword arguments, with tokens.
      outputs: The tokens of its outputs.
    """

    def __init__(self, operation: Any, args: Any, kwargs: Any) -> None:
        self.operation = operation
        self.arguments: Any = (args, kwargs)
        self.outputs = tree.map_structure(lambda _: Token(), operation.output)


class BlockCalls:
    """The recorded calls of a run of equal blocks.

    Args:
      blocks: The blocks.
      operation_fn: The function that prepares an operation for its call.

    Attributes:
      blocks: The blocks.
      entering: The value that enters the first block, once all calls are
        recorded.
    """

    def __init__(
        self, blocks: Blocks, operation_fn: Callable[..., Any]
    ) -> None:
        self.blocks = blocks
        self.entering: Any = None
        self._operation_fn = operation_fn
        self._calls: list[_Call] = []
        self._entry = Token()
        self._masks: list[tuple[Any, Any]] = []

    def record(self, operation: Any, args: Any, kwargs: Any) -> Tree:
        """Records a call and returns the tokens of its outputs."""
        self._calls.append(_Call(operation, args, kwargs))
        if self.is_complete:
            self._replace_entering()
            # Keras's layers may take masks off the tensors that they read.
            self._masks = [
                (leaf, get_keras_mask(leaf))
                for call in self._calls
                for leaf in flatten(call.arguments)
                if hasattr(leaf, "shape")
            ]
        return self._calls[-1].outputs

    @property
    def is_complete(self) -> bool:
        """Whether the calls of all blocks are recorded."""
        return len(self._calls) == sum(map(len, self.blocks.segments))

    def compute(self, number: int, value: Array) -> Array:
        """Computes one block for an input, and forgets all values.

        Args:
          number: The block's number.
          value: The input. In the recorded calls, it is the output of the
            previous block.

        Returns:
          The block's output.
        """
        entry = self._trunk(number - 1) if number else self._entry
        entry.value = value
        calls = self._calls_of(number)
        try:
            self._compute(calls)
            return self._trunk(number).value
        finally:
            tokens = [t for call in calls for t in flatten(call.outputs)]
            for token in (entry, *tokens):
                token.value = None

    def set_result(self, value: Array) -> None:
        """Sets the output of the last block."""
        self._trunk(len(self.blocks) - 1).value = value

    def compute_all(self) -> None:
        """Computes all blocks, one by one, as if nothing had been recorded."""
        for tensor, mask in self._masks:
            if get_keras_mask(tensor) is not mask:
                set_keras_mask(tensor, mask)
        self._entry.value = self.entering
        self._compute(self._calls)

    def _compute(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            args, kwargs = resolve(call.arguments)
            outputs = self._operation_fn(call.operation)(*args, **kwargs)
            for token, output in zip(
                flatten(call.outputs), flatten(outputs), strict=True
            ):
                token.value = output

    def _replace_entering(self) -> None:
        """Replaces the input of the first block by a token.

        The first block reads its input where the second block reads the output
        of the first.
        """
        trunk = self._trunk(0)
        pairs = zip(self._calls_of(0), self._calls_of(1), strict=True)
        for first, second in pairs:
            leaves = flatten(first.arguments)
            others = flatten(second.arguments)
            for place, other in enumerate(others):
                if other is trunk:
                    self.entering = leaves[place]
                    leaves[place] = self._entry
            first.arguments = tree.pack_sequence_as(first.arguments, leaves)

    def _calls_of(self, number: int) -> list[_Call]:
        size = len(self.blocks.segments[0])
        return self._calls[number * size : (number + 1) * size]

    def _trunk(self, number: int) -> Token:
        """Returns the token of the output that the next block reads."""
        operation, index = self.blocks.trunks[number]
        calls = self._calls_of(number)
        (maker,) = [call for call in calls if call.operation is operation]
        return flatten(maker.outputs)[index]

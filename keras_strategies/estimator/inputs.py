"""Converts the data of an `input_fn` for `fit`, `evaluate` and a `model_fn`."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Array, Dataset, Tree
from keras_strategies.estimator.arguments import find_argument_names
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import ModeKeys, is_tensor
from keras_strategies.estimator.seam import (
    DistributedDataset,
    InputContext,
    Source,
    Strategy,
    all_rows,
    host_batches,
    shorten,
)

DEFAULT_BATCH_SIZE = 32
"""Rows per batch if an `input_fn` returns arrays; the default of Keras."""

_FIX = (
    "Return a dataset (tf.data, a PyDataset, grain, a generator of batches) "
    "or (features, labels) as arrays."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """The data that an `input_fn` returned.

    Attributes:
      x: Features as arrays, or a dataset of (features, labels).
      y: Labels as arrays. None if `x` is a dataset or there are no labels.
      sample_weight: The weight of each row as an array, or None.
      example: A batch of the data, or a nested structure like that of a batch,
        whose leaves have shapes and dtypes.
      is_dataset: Whether `x` is a dataset.
      is_infinite: Whether `x` is a dataset that declares itself infinite.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    example: Tree
    is_dataset: bool
    is_infinite: bool = False

    def make_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `fit` or `evaluate` for the data."""
        if self.is_dataset:
            return {"x": self.x}
        return {
            "x": self.x,
            "y": self.y,
            "sample_weight": self.sample_weight,
            "batch_size": DEFAULT_BATCH_SIZE,
        }

    def iter_batches(self) -> Iterator[Tree]:
        """Yields the features batch by batch, as NumPy arrays."""
        if self.is_dataset:
            for batch in _iter_global_batches(self.x):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                yield x
            return
        num_rows = len(keras.tree.flatten(self.x)[0])
        for start in range(0, num_rows, DEFAULT_BATCH_SIZE):
            rows = slice(start, start + DEFAULT_BATCH_SIZE)
            yield keras.tree.map_structure(
                lambda leaf, rows=rows: np.asarray(leaf)[rows], self.x
            )


def call_input_fn(
    input_fn: Callable[..., Any],
    *,
    mode: str,
    params: Mapping[str, Any],
    config: RunConfig,
    strategy: Strategy,
) -> Input:
    """Calls an `input_fn` with the arguments that its signature contains.

    If the function has the argument `input_context`, it must return a
    process-local dataset of per-replica batches, as in TensorFlow. In that
    case, all processes must make this call.

    Raises:
      TypeError: if the function does not return data.
      ValueError: if the data are invalid, or if the function has
        `input_context` but does not return a dataset.
    """
    names = find_argument_names(input_fn)
    known = {"mode": mode, "params": params, "config": config}
    keywords = {name: known[name] for name in names if name in known}
    if "input_context" not in names:
        return _make_input(input_fn(**keywords), mode)
    inputs: list[Input] = []

    def dataset_fn(context: InputContext) -> Dataset:
        data = input_fn(input_context=context, **keywords)
        inputs.append(_make_input(data, mode))
        if not inputs[-1].is_dataset or isinstance(inputs[-1].x, Iterator):
            raise ValueError(
                "An `input_fn` with `input_context` must return a dataset of "
                "per-replica batches that can be read again, but returned "
                "arrays or an iterator. Or remove the argument `input_context`."
            )
        return inputs[-1].x

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return dataclasses.replace(inputs[0], x=dataset)


def make_symbols(example: Tree) -> tuple[Tree, Tree]:
    """Returns symbolic features and labels for a `model_fn`.

    Args:
      example: See `Input.example`.

    Returns:
      A tuple of features and labels. Features are `keras.Input`s for a
      functional model; features in a dict are named by their keys. Labels are
      `keras.KerasTensor`s, or None.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(example)
    return _map_leaves(_make_input_like, x), _map_leaves(_make_tensor_like, y)


def _make_input(data: Dataset, mode: str) -> Input:
    if data is None:
        raise TypeError(
            f"An `input_fn` must return data. Received: None. {_FIX}"
        )
    if isinstance(data, list) and data and isinstance(data[0], tuple):
        data = iter(data)  # A list of batches.
    if _is_nest_of_arrays(data):
        return _from_arrays(data, mode)
    if isinstance(data, Iterator):
        return _from_iterator(data)
    is_data = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    # A tuple of Python lists (features, labels) is rejected: it would be read
    # as two batches.
    is_data &= not isinstance(data, str | bytes | tuple | Mapping)
    if not is_data:
        raise TypeError(
            f"An `input_fn` must return data. Received: {shorten(data)} of "
            f"type {type(data).__name__}. {_FIX}"
        )
    return Input(
        x=data,
        example=_find_example(data),
        is_dataset=True,
        is_infinite=_is_infinite(data),
    )


def _from_arrays(data: Tree, mode: str) -> Input:
    data = keras.tree.map_structure(_convert_leaf, data)
    if not isinstance(data, list | tuple):
        return Input(x=data, example=(data,), is_dataset=False)
    if len(data) > 3:
        raise ValueError(
            "An `input_fn` must return (features, labels), or (features, "
            f"labels, sample_weight). Received: {len(data)} entries. If there "
            "are several features, return them in one dict."
        )
    x, y, weight = (*data, None, None)[:3]
    if x is None:
        raise TypeError(
            "An `input_fn` must return data. Received: None for the features. "
            f"{_FIX}"
        )
    if mode == ModeKeys.PREDICT:
        y = weight = None
    return Input(
        x=x, y=y, sample_weight=weight, example=(x, y), is_dataset=False
    )


def _from_iterator(data: Iterator[Any]) -> Input:
    """Converts an iterator to an `Input`; the first batch is its example.

    Raises:
      ValueError: if the iterator is empty.
    """
    try:
        first = next(data)
    except StopIteration:
        raise ValueError(
            "An `input_fn` must return data, but its iterator yields no "
            "batches. Check the source that the iterator reads."
        ) from None

    def batches() -> Iterator[Any]:
        yield from itertools.chain([first], data)

    return Input(x=batches(), example=first, is_dataset=True)


def _iter_global_batches(dataset: Dataset) -> Iterator[Tree]:
    """Returns an iterator over a dataset's global batches on the host."""
    if not isinstance(dataset, DistributedDataset):
        return host_batches(dataset)
    source = dataset.source
    # Reading the batches once counts as one epoch, so the next iterator reads
    # the next epoch.
    epoch = source.passes.next
    source.passes.reach(epoch + 1)
    return (part.data for part in source.read(epoch, 0, all_rows))


def _is_nest_of_arrays(data: object) -> bool:
    """Returns whether data are arrays, or dicts, lists or tuples of arrays."""
    if isinstance(data, Mapping):
        return bool(data) and all(map(_is_nest_of_arrays, data.values()))
    if isinstance(data, list | tuple):
        some = [value for value in data if value is not None]
        return bool(some) and all(map(_is_nest_of_arrays, some))
    # Series and DataFrames of pandas, which have `iloc`, count as arrays.
    return is_tensor(data) or hasattr(data, "iloc")


def _convert_leaf(leaf: Any) -> Any:
    """Converts an object of pandas to an array, and other mappings to dicts."""
    if isinstance(leaf, Mapping):
        # Of a class that Keras's trees do not know, such as a `UserDict`.
        return keras.tree.map_structure(_convert_leaf, dict(leaf))
    return leaf.to_numpy() if hasattr(leaf, "iloc") else leaf


def _find_example(data: Dataset) -> Tree:
    """Returns a batch of a dataset, or the batch's shapes and dtypes."""
    if isinstance(data, DistributedDataset):
        return next(data.source.read(0, 0, all_rows)).data
    spec = getattr(data, "element_spec", None)
    if spec is not None:
        return spec
    if isinstance(data, keras.utils.PyDataset):
        return data[0]
    return next(iter(data))


def _is_infinite(data: Dataset) -> bool:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return int(data.cardinality()) == tensorflow.data.INFINITE_CARDINALITY
    source = data.source if isinstance(data, DistributedDataset) else data
    if isinstance(source, Source):
        return source.is_infinite
    if isinstance(data, keras.utils.PyDataset):
        num_batches: Any = data.num_batches
        return num_batches is None
    return False


def _map_leaves(function: Callable[[Any, str | None], Any], nest: Tree) -> Tree:
    """Replaces each leaf of a nest, but None, with `function(leaf, key)`.

    The key consists of the dict keys and indices of the leaf, joined with "_".
    It is None if the leaf is not in a dict.
    """
    leaves = []
    for path, leaf in keras.tree.flatten_with_path(nest):
        # Without the indices before the first key of a dict.
        names = itertools.dropwhile(lambda name: isinstance(name, int), path)
        key = "_".join(map(str, names)) or None
        leaves.append(None if leaf is None else function(leaf, key))
    return keras.tree.pack_sequence_as(nest, leaves)


def _compute_shape_and_dtype(
    leaf: Array, key: str | None
) -> tuple[tuple[int | None, ...], str]:
    """Returns the shape of a leaf's rows, and the dtype that Keras uses.

    Raises:
      ValueError: if the shape is unknown, or the leaf is a scalar.
      TypeError: if the leaf contains strings or objects.
    """
    shape, dtype = _read_shape_and_dtype(leaf)
    if not len(shape):
        raise ValueError(
            "The data must be batches of rows. Received: a scalar"
            f"{_format_key(key)} of dtype {dtype}. Call "
            "`.batch(batch_size)` on the dataset."
        )
    if str(getattr(dtype, "name", dtype)) in ("string", "object") or (
        getattr(dtype, "kind", None) in ("S", "U")
    ):
        raise TypeError(
            "Features and labels must be numbers or booleans. Received: "
            f"strings{_format_key(key)}. Omit them, or encode them in the "
            "`input_fn`, for example with `keras.utils.FeatureSpace` or "
            "`keras.layers.StringLookup` in `dataset.map`."
        )
    # Keras's `fit` converts floats to floatx, and JAX has no int64 by default.
    name = keras.backend.standardize_dtype(dtype)
    if name in ("float16", "float32", "float64"):
        name = keras.config.floatx()
    elif name == "int64":
        name = "int32"
    return tuple(shape)[1:], name


def _read_shape_and_dtype(leaf: Array) -> tuple[Any, Any]:
    if not is_tensor(leaf):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype)
    return leaf.shape, np.dtype(dtype) if isinstance(dtype, type) else dtype


def _format_key(key: str | None) -> str:
    return "" if key is None else f" in {key!r}"


def _make_input_like(leaf: Array, key: str | None) -> Array:
    shape, dtype = _compute_shape_and_dtype(leaf, key)
    return keras.Input(shape, dtype=dtype, name=key)


def _make_tensor_like(leaf: Array, key: str | None) -> keras.KerasTensor:
    shape, dtype = _compute_shape_and_dtype(leaf, key)
    return keras.KerasTensor((None, *shape), dtype=dtype, name=key)

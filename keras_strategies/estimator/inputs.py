"""The results of an `input_fn`, for Keras's loops and for a `model_fn`."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Array, Dataset, Tree
from keras_strategies.cluster.addresses import shown
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.source import Source, all_rows
from keras_strategies.data.sources.from_function import InputContext
from keras_strategies.data.sources.iterables import host_batches
from keras_strategies.estimator.arguments import names_of_arguments
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import ModeKeys, is_tensor
from keras_strategies.strategy.strategy import Strategy

DEFAULT_BATCH_SIZE = 32
"""Rows of a batch where arrays are returned; as in Keras."""

# Batches that building a model may read: one for each replica.
_MOST_SEEN = 512
_CURE = (
    "Return a dataset (tf.data, a PyDataset, grain, a generator of batches) "
    "or (features, labels) as arrays."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """What an `input_fn` returned.

    Attributes:
      x: Features as arrays, or a dataset of (features, labels).
      y: Labels, beside features as arrays.
      sample_weight: Weights of rows, likewise.
      example: A batch, or what stands for one, to show its structure: arrays
        and specs with shapes and dtypes.
      is_dataset: Whether x is a dataset.
      is_endless: Whether it is a dataset that surely never ends.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    example: Tree
    is_dataset: bool
    is_endless: bool = False

    def arguments(self) -> dict[str, Any]:
        """The data arguments of `fit` and `evaluate`."""
        if self.is_dataset:
            return {"x": self.x}
        return {
            "x": self.x,
            "y": self.y,
            "sample_weight": self.sample_weight,
            "batch_size": DEFAULT_BATCH_SIZE,
        }

    def batches(self) -> Iterator[Tree]:
        """The features of one batch after the other, as numpy arrays."""
        if self.is_dataset:
            for batch in _global_batches(self.x):
                yield keras.utils.unpack_x_y_sample_weight(_as_element(batch))[
                    0
                ]
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
    """Calls an `input_fn` with the arguments that it has names for.

    One with `input_context` makes a process's own dataset, of batches for one
    replica, as in tf. Collective then.

    Raises:
      TypeError: it returns no data.
      ValueError: with `input_context`, no dataset.
    """
    names = names_of_arguments(input_fn)
    known = {"mode": mode, "params": params, "config": config}
    keywords = {name: known[name] for name in names if name in known}
    if "input_context" not in names:
        return _input_of(input_fn(**keywords), mode)
    made: list[Input] = []

    def dataset_fn(context: InputContext) -> Dataset:
        data = input_fn(input_context=context, **keywords)
        made.append(_input_of(data, mode))
        if not made[-1].is_dataset:
            raise ValueError(
                "An `input_fn` with `input_context` returns a dataset. "
                f"Received: arrays, from {shown(input_fn)}. {_CURE}"
            )
        x = made[-1].x
        return _Replayed(x) if isinstance(x, Iterator) else x

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return dataclasses.replace(made[0], x=dataset)


def symbols_of(example: Tree) -> tuple[Tree, Tree]:
    """Symbolic features and labels for a `model_fn`.

    Args:
      example: A batch, or specs of one.

    Returns:
      Features as `keras.Input`s, those in a dict named by their keys, to make
      a functional model of; labels as `keras.KerasTensor`s, None if there are
      none.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(_as_element(example))
    return _mapped(_input_like, x), _mapped(_tensor_like, y)


class _Replayed:
    """An iterator that a model is built with, and then begun anew.

    Args:
      iterator: Batches.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._rest = iterator
        self._seen: list[Any] | None = []

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._seen or ())
        for batch in self._rest:
            if self._seen is not None:
                self._seen.append(batch)
                if len(self._seen) > _MOST_SEEN:
                    self._seen = None
            yield batch


def _input_of(data: Dataset, mode: str) -> Input:
    if data is None:
        raise TypeError(f"An `input_fn` returns data. Received: None. {_CURE}")
    if isinstance(data, list) and data and isinstance(data[0], tuple):
        data = iter(data)  # Of batches.
    if _is_nest_of_arrays(data):
        return _of_arrays(data, mode)
    if isinstance(data, Iterator):
        return _of_iterator(data)
    is_data = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    # (features, labels) of Python lists would be two batches.
    is_data &= not isinstance(data, str | bytes | tuple | Mapping)
    if not is_data:
        raise TypeError(
            f"An `input_fn` returns data. Received: {shown(data)} of type "
            f"{type(data).__name__}. {_CURE}"
        )
    return Input(
        x=data,
        example=_example_of(data),
        is_dataset=True,
        is_endless=_is_endless(data),
    )


def _of_arrays(data: Tree, mode: str) -> Input:
    if not isinstance(data, list | tuple):
        return Input(x=_plain(data), example=(data,), is_dataset=False)
    if len(data) > 3:
        raise ValueError(
            "An `input_fn` returns (features, labels), and maybe weights of "
            f"rows. Received: {len(data)} entries. Put several features into "
            "a dict."
        )
    x, y, weight = (*data, None, None)[:3]
    if x is None:
        raise TypeError(
            "An `input_fn` returns data. Received: None for the features. "
            f"{_CURE}"
        )
    if mode == ModeKeys.PREDICT:
        y = weight = None
    return Input(
        x=_plain(x),
        y=None if y is None else _plain(y),
        sample_weight=weight,
        example=(x, y),
        is_dataset=False,
    )


def _of_iterator(data: Iterator[Any]) -> Input:
    """An iterator's first batch is looked at, and given out again."""
    try:
        first = next(data)
    except StopIteration:
        raise ValueError(
            "An `input_fn` returns data. Received: an iterator without a "
            "batch. Look at what it reads."
        ) from None

    def batches() -> Iterator[Any]:
        yield from itertools.chain([first], data)

    return Input(x=batches(), example=first, is_dataset=True)


def _global_batches(dataset: Dataset) -> Iterator[Tree]:
    """The batches of all replicas together, on the host."""
    if not isinstance(dataset, DistributedDataset):
        return host_batches(dataset)
    source = dataset.source
    epoch = source.passes.next
    source.passes.reach(epoch + 1)
    return (part.data for part in source.read(epoch, 0, all_rows))


def _is_nest_of_arrays(data: object) -> bool:
    """Whether it is arrays in dicts, lists and tuples, and nothing else."""
    if isinstance(data, Mapping):
        return bool(data) and all(map(_is_nest_of_arrays, data.values()))
    if isinstance(data, list | tuple):
        some = [value for value in data if value is not None]
        return bool(some) and all(map(_is_nest_of_arrays, some))
    # Series and frames of pandas have rows, too.
    return is_tensor(data) or hasattr(data, "iloc")


def _plain(data: Tree) -> Tree:
    """Columns of pandas as arrays; what is one already as it is."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(_plain, data))
    return data.to_numpy() if hasattr(data, "iloc") else data


def _example_of(data: Dataset) -> Tree:
    """A batch of a dataset, or specs of one."""
    if isinstance(data, DistributedDataset):
        return data.element_spec
    spec = getattr(data, "element_spec", None)
    if spec is not None:
        return spec
    if isinstance(data, keras.utils.PyDataset):
        return data[0]
    return next(iter(data))


def _is_endless(data: Dataset) -> bool:
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


def _as_element(batch: Tree) -> Tree:
    return tuple(batch) if isinstance(batch, list) else batch


def _mapped(function: Callable[[Any, str | None], Any], nest: Tree) -> Tree:
    """A nest with a function of each leaf and its key, if it has one."""

    def visit(value: Tree, key: str | None) -> Tree:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {
                k: visit(v, str(k) if key is None else f"{key}_{k}")
                for k, v in value.items()
            }
        if isinstance(value, list | tuple) and not _is_pair(value):
            names = [key and f"{key}_{index}" for index in range(len(value))]
            return type(value)(map(visit, value, names))
        return function(value, key)

    return visit(nest, None)


def _is_pair(value: object) -> bool:
    """Whether it is (shape, dtype), as `element_spec` of ours has them."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], tuple)
        and isinstance(value[1], np.dtype)
    )


def _shape_and_dtype(
    leaf: Array, key: str | None
) -> tuple[tuple[int | None, ...], str]:
    """The shape without rows, and the dtype as Keras feeds it."""
    shape, dtype = leaf if _is_pair(leaf) else _facts(leaf)
    if getattr(shape, "rank", 0) is None:
        raise ValueError(
            "A model is made for the shapes of its data. Received: data "
            f"without any{_of_key(key)}. Give `output_signature` to "
            "`tf.data.Dataset.from_generator`, or call `tf.ensure_shape` in "
            "`dataset.map`."
        )
    if not len(shape):
        raise ValueError(
            f"Data come in batches of rows. Received: a scalar{_of_key(key)} "
            f"of dtype {dtype}. Call `.batch(batch_size)` on the dataset."
        )
    if str(getattr(dtype, "name", dtype)) in ("string", "object") or (
        getattr(dtype, "kind", None) in ("S", "U")
    ):
        raise TypeError(
            "Features and labels are numbers or booleans. Received: strings"
            f"{_of_key(key)}. Encode them in the `input_fn`, by "
            "`keras.utils.FeatureSpace`, `keras.layers.StringLookup` or "
            "`Hashing` in `dataset.map`, or leave them out."
        )
    name = keras.backend.standardize_dtype(dtype)
    if name in ("float16", "float32", "float64"):
        name = keras.config.floatx()
    elif name == "int64":
        name = "int32"
    return tuple(shape)[1:], name


def _facts(leaf: Array) -> tuple[Any, Any]:
    if hasattr(leaf, "iloc"):
        leaf = leaf.to_numpy()
    if not is_tensor(leaf):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype)
    return leaf.shape, np.dtype(dtype) if isinstance(dtype, type) else dtype


def _of_key(key: str | None) -> str:
    return "" if key is None else f" in {key!r}"


def _input_like(leaf: Array, key: str | None) -> Array:
    shape, dtype = _shape_and_dtype(leaf, key)
    return keras.Input(shape, dtype=dtype, name=key)


def _tensor_like(leaf: Array, key: str | None) -> keras.KerasTensor:
    shape, dtype = _shape_and_dtype(leaf, key)
    return keras.KerasTensor((None, *shape), dtype=dtype, name=key)

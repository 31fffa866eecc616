"""Initial values of variables: all processes use the chief's values.

Each process draws initial values itself, from a process-local random state. So
before variables are placed, the chief's values are sent to all processes. For
Keras's random initializers, the chief sends only the seed, from which all
processes draw the same values.
"""

import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.backend.common.name_scope import current_path

from keras_strategies._types import Array, Shape
from keras_strategies.cluster.exchange import same_variables
from keras_strategies.cluster.exchange.same_variables import Note
from keras_strategies.cluster.user_code import list_frames, locate_frame
from keras_strategies.passes.traces import is_tracing
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.host_arrays import copy_on_host
from keras_strategies.spmd.mesh import ReplicaMesh, make_mesh

# Up to this number of bytes, a value is sent in a message of the chief, which
# takes less time than a program.
_MAX_IN_MESSAGE = 1 << 14
_MAX_SHOWN = 4
# Of the values that processes draw from the same seed, so many are compared.
_MAX_COMPARED = 1 << 12
_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones)


VariableCreator = Callable[..., keras.Variable]
"""A function of `next_creator` (if any) and the keywords of
`keras.Variable`."""


def create(
    mesh: ReplicaMesh, next_creator: VariableCreator, **kwargs: Any
) -> keras.Variable:
    """Creates a variable with the same initial value in all processes.

    Raises:
      ValueError: if processes have created different variables. If a large
        value must be sent, they compare all of them now, otherwise at the end
        of the scope.
    """
    given = kwargs.get("initializer")
    noted = _note_new(mesh, **kwargs)
    if callable(given) or isinstance(given, str):
        given = make_chief_initializer(given, mesh, noted)
    elif getattr(given, "is_fully_addressable", True) and not is_tracing():
        value = keras.ops.convert_to_tensor(given, dtype=kwargs.get("dtype"))
        given = place(value, mesh.whole)
    return next_creator(**kwargs | {"initializer": given})


def make_chief_initializer(
    initializer: Any, mesh: ReplicaMesh, noted: Note
) -> Any:
    """Makes an initializer that returns the chief's value in all processes.

    Args:
      initializer: A function, or the name of a Keras initializer.
      mesh: The mesh of the replicas.
      noted: The variable's note.

    Returns:
      A function of shape and dtype.
    """
    initializer = keras.initializers.get(initializer)
    if mesh.num_processes == 1 or isinstance(initializer, _FromChief):
        return initializer
    return _FromChief(initializer, mesh, noted)


def _note_new(mesh: ReplicaMesh, **kwargs: Any) -> Note:
    given: Any = kwargs.get("initializer")
    shape = kwargs.get("shape")
    dtype = kwargs.get("dtype") or getattr(given, "dtype", None)
    if shape is None and not callable(given):
        shape = np.shape(given)
    path = (current_path(), kwargs.get("name") or "variable")
    noted = Note(
        path="/".join(filter(None, path)),
        shape=str(tuple(shape or ())),
        dtype=keras.backend.standardize_dtype(dtype),
        trainable=_name_trainable(kwargs.get("trainable", True)),
        initializer=name_initializer(given),
        where=locate_frame(list_frames(threading.get_ident())),
    )
    same_variables.note(mesh.processes, noted)
    return noted


def compare_existing(
    mesh: ReplicaMesh, variables: Iterable[keras.Variable]
) -> None:
    """Compares new and existing variables between processes. Collective.

    Args:
      mesh: The mesh of the replicas, of several processes.
      variables: This process's existing variables.

    Raises:
      ValueError: if they differ in number, path, shape, dtype or `trainable`.
        All processes raise it.
    """
    for variable in variables:
        note_existing(mesh, variable, "its current value")
    same_variables.compare(mesh.processes, always=True)


def note_existing(
    mesh: ReplicaMesh, variable: keras.Variable, value: str
) -> Note:
    """Notes an existing variable, for the comparison.

    Args:
      mesh: The mesh of the replicas.
      variable: The variable.
      value: A description of its value.

    Returns:
      The note.
    """
    noted = Note(
        path=variable.path,
        shape=str(tuple(variable.shape)),
        dtype=variable.dtype,
        trainable=_name_trainable(variable.trainable),
        initializer=value,
    )
    same_variables.note(mesh.processes, noted)
    return noted


def _name_trainable(is_trainable: bool) -> str:
    return "trainable" if is_trainable else "not trainable"


def name_initializer(initializer: Any) -> str:
    """Returns an initializer's kind, or a value's first entries."""
    if isinstance(initializer, _FromChief):
        return name_initializer(initializer.initializer)
    if isinstance(initializer, str):
        return name_initializer(keras.initializers.get(initializer))
    if not getattr(initializer, "is_fully_addressable", True):
        return "an array"
    if not callable(initializer):
        value = np.asarray(initializer)
        digest = same_variables.compute_digest(value)[:16]
        first = ", ".join(map(str, value.flat[:_MAX_SHOWN].tolist()))
        return f"{value}" if not value.ndim else f"[{first}, ...] ({digest})"
    if not isinstance(initializer, keras.initializers.Initializer):
        return "a function"
    name = type(initializer).__name__
    if _is_seeded(initializer):
        config = initializer.get_config()
        names = sorted(config.keys() - {"seed"})
        return f"{name}({', '.join(f'{n}={config[n]}' for n in names)})"
    value = getattr(initializer, "value", None)
    return f"{name}({value})" if _is_constant(initializer) else name


def _is_constant(initializer: Any) -> bool:
    """Returns whether an initializer's name contains all of its values."""
    if type(initializer) is keras.initializers.Constant:
        return isinstance(initializer.value, int | float)
    # A subclass may compute other values, in each process its own.
    return type(initializer) in _CONSTANTS


def _is_seeded(initializer: Any) -> bool:
    """Returns whether Keras's initializer makes each entry from random bits.

    `Orthogonal` does not: its decomposition depends on the kind of processor.
    """
    kind, other = type(initializer), keras.initializers.Orthogonal
    return kind is not other and kind.__module__ == other.__module__


def place(value: Array, sharding: NamedSharding) -> jax.Array:
    """Puts a value, which must be equal in all processes, on their devices."""
    # JAX's `device_put` would compare the values on the devices, all at once.
    full = np.asarray(value)
    return jax.make_array_from_callback(
        full.shape, sharding, lambda index: copy_on_host(full[index])
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _FromChief:
    """An initializer that returns the chief's value in all processes.

    Attributes:
      initializer: The initializer that computes this process's value.
      mesh: The mesh of the replicas.
      noted: The variable's note.
    """

    initializer: Callable[..., Any]
    mesh: ReplicaMesh
    noted: Note

    def __call__(
        self, shape: Shape, dtype: str | None = None, **kwargs: Any
    ) -> Array:
        if _is_constant(self.initializer):
            # Equal in all processes, which compare the initializer's kind.
            value = self.initializer(shape, dtype=dtype, **kwargs)
            return value if is_tracing() else place(value, self.mesh.whole)
        # Keras compiles the initializer of a large variable. All processes must
        # trace the same program, and no process should have to store the full
        # value. So the chief sends only the seed, if the initializer has one.
        seed = getattr(self.initializer, "seed", None)
        is_seeded = is_tracing() or _is_seeded(self.initializer)
        if is_seeded and isinstance(seed, int):
            return self._draw(seed, shape, dtype=dtype, **kwargs)
        with jax.ensure_compile_time_eval():
            value = self.initializer(shape, dtype=dtype, **kwargs)
            array = self._send(np.asarray(value))
        if not is_tracing():
            return array
        return jax.numpy.asarray(np.asarray(array.addressable_data(0)))

    def _draw(self, seed: int, *args: Any, **kwargs: Any) -> Array:
        """Draws a value from the chief's seed."""
        processes, sent = self.mesh.processes, np.int64(seed).tobytes()
        received = same_variables.share(processes, self.noted, sent)
        seeded = copy.copy(self.initializer)
        seeded.seed = int(np.frombuffer(received, np.int64)[0])
        value = seeded(*args, **kwargs)
        if is_tracing():
            return value
        # Other hardware or another JAX may draw other values.
        first = np.asarray(value).ravel()[:_MAX_COMPARED]
        drawn = f"{self.noted.initializer} {name_initializer(first)}"
        same_variables.note(
            processes, dataclasses.replace(self.noted, initializer=drawn)
        )
        return place(value, self.mesh.whole)

    def _send(self, value: np.ndarray) -> jax.Array:
        """Sends the chief's value of a new variable to all processes."""
        processes = self.mesh.processes
        if value.nbytes > _MAX_IN_MESSAGE:
            same_variables.compare(processes)
            return broadcast([value], self.mesh)[0]
        data = same_variables.share(processes, self.noted, value.tobytes())
        array = np.frombuffer(data, value.dtype).reshape(value.shape)
        return place(array, self.mesh.whole)


def broadcast(values: Sequence[Any], mesh: ReplicaMesh) -> list[jax.Array]:
    """Broadcasts the chief's arrays to all devices.

    All processes must call this function together.

    Args:
      values: This process's arrays. In every process they must have the same
        shapes and dtypes as in the chief; only the chief's contents are used.
      mesh: The replicas.

    Returns:
      The chief's arrays, replicated on all devices of the mesh.
    """
    # An array has a row for each device, not for each replica: the cores of a
    # replica may belong to several processes, which would provide the same row.
    split = mesh.split
    if mesh.cores_per_replica > 1:
        devices = make_mesh(mesh.devices, (mesh.axis,))
        split = NamedSharding(devices, PartitionSpec(mesh.axis))

    def column(value: Array) -> jax.Array:
        host = np.asarray(value)[None]
        shape = (split.num_devices, *host.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda _: host)

    columns = [column(value) for value in values]
    return dispatch(mesh, _first_rows(mesh), columns)


def place_from_chief(
    values: Sequence[Any], shardings: Sequence[Any], mesh: ReplicaMesh
) -> list[jax.Array]:
    """Sends the chief's arrays to all processes, and shards them if needed.

    All processes must call this function together.

    Args:
      values: See `broadcast`.
      shardings: The sharding of each result.
      mesh: The replicas.
    """
    is_replicated = [sharding is mesh.whole for sharding in shardings]
    sent = broadcast(list(itertools.compress(values, is_replicated)), mesh)
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        if sharding is mesh.whole:
            placed.append(sent.pop(0))
            continue
        divide = jax.jit(list, out_shardings=[sharding])
        placed += dispatch(mesh, divide, broadcast([value], mesh))
    return placed


@functools.cache
def _first_rows(mesh: ReplicaMesh) -> Callable[..., list[jax.Array]]:
    return jax.jit(
        lambda columns: [column[0] for column in columns],
        out_shardings=mesh.whole,
    )

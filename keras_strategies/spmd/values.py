"""Values with one component for each replica."""

import enum
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from keras_strategies._types import Array, Tree
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh

STACKED = "stacked"
"""Component i is entry i of the first dimension. If the value has `shapes`, it
is padded, and must be cut to the i-th of these."""
ROWS = "rows"
"""Component i is the i-th of equally long parts of the first dimension."""
LOCAL = "local"
"""Inside a traced program: the array is this replica's component."""
PARTS = "parts"
"""Each replica has a separate array; the shapes may differ."""

Shapes = tuple[tuple[int, ...], ...]


class ReduceOp(enum.Enum):
    """A reduction over replicas. Its name, such as "SUM", is accepted as well.

    Example:
      >>> total = strategy.reduce(ks.ReduceOp.SUM, batch, axis=0)
    """

    SUM = "SUM"
    MEAN = "MEAN"


class DistributedValues:
    """A value with a component on each replica.

    The base class of `PerReplica` and `Mirrored`, which are pytree nodes.
    `values` contains the components in the order of replica ids.

    Example:
      >>> first, *others = strategy.run(step, args=batch).values
    """

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that are on this process's devices."""
        raise NotImplementedError


class PerReplica(DistributedValues):
    """A value that differs from replica to replica.

    Args:
      values: The components, which are arrays.

    Attributes:
      layout: The arrangement of the components in `arrays`.
      arrays: One array with all components, or one array per component.
      total: The sum of the components if it is already computed, or None.
      shapes: The shapes of all components, if these are padded in `arrays`.

    Example:
      >>> ids = ks.PerReplica(range(strategy.num_replicas_in_sync))
      >>> strategy.run(lambda i: 10 * i, args=(ids,)).values[1]
      Array(10, dtype=int32)
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.layout = PARTS
        self.arrays = tuple(values)
        self.total: Any = None
        self.shapes: Shapes | None = None

    @classmethod
    def of(
        cls,
        array: Array,
        layout: str,
        total: Array | None = None,
        shapes: "Shapes | None" = None,
    ) -> "PerReplica":
        """Creates a `PerReplica` from one array with all replicas' components.

        Args:
          array: The array.
          layout: The arrangement of the components in it.
          total: The sum of the components, if it is already computed.
          shapes: The components' shapes, if these are padded in the array.
        """
        value = cls((array,))
        value.layout, value.total, value.shapes = layout, total, shapes
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        """The components on each replica's first device; runs no collective."""
        if self.layout == PARTS:
            return self.arrays
        if isinstance(self.arrays[0], jax.ShapeDtypeStruct):
            return self._shapes_of_components(self.arrays[0])
        if self.layout == LOCAL:
            raise RuntimeError(
                "Inside `merge_call`, `.values` cannot be read, because each "
                "device of the program has only one component. Use "
                "`strategy.extended.reduce_to`."
            )
        # A replica's part comes from its first core in this process.
        parts: dict[int, Any] = {}
        for shard in self.arrays[0].addressable_shards:
            parts.setdefault(shard.index[0].start or 0, shard.data)
        shards = sorted(parts.items(), key=lambda part: part[0])
        if self.layout == ROWS:
            return tuple(data for _, data in shards)
        if self.shapes is not None:
            return tuple(cut(data[0], self.shapes[i]) for i, data in shards)
        return tuple(data[0] for _, data in shards)

    def _shapes_of_components(
        self, struct: jax.ShapeDtypeStruct
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape and dtype of each replica's component."""
        sharding: Any = struct.sharding
        length, *rest = sharding.shard_shape(struct.shape)
        shape = (length, *rest) if self.layout == ROWS else tuple(rest)
        component = jax.ShapeDtypeStruct(shape, struct.dtype)
        return (component,) * (struct.shape[0] // (length or 1))

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling a sharded array would put it on one device.
        return PerReplica, (tuple(map(np.asarray, self.values)),)

    def __repr__(self) -> str:
        shapes = [np.shape(array) for array in self.arrays]
        return f"PerReplica({self.layout}, shapes={shapes})"

    def __str__(self) -> str:
        """Returns this process's components, one line for each replica."""
        is_traced = any(isinstance(a, Tracer) for a in self.arrays)
        if is_traced or self.layout == LOCAL:
            return repr(self)
        lines = [f"  {k}: {_format(v)}" for k, v in enumerate(self.values)]
        return "\n".join(["PerReplica:{", *lines, "}"])

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "A PerReplica must not be used as one array, or passed to a "
            "`tf.function`. Convert it with `reduce`, "
            "`gather` or `experimental_local_results`, or use `@ks.function`."
        )


class Mirrored(DistributedValues):
    """A value that is the same on every replica.

    Args:
      array: An array that is replicated, or sharded, over the strategy's
        devices.
      mesh: The strategy's replicas; None for the devices of the array.

    Example:
      >>> strategy.run(lambda rate: 2 * rate, args=(ks.Mirrored(0.5),))
      1.0
    """

    def __init__(self, array: Array, mesh: ReplicaMesh | None = None) -> None:
        self.array = array
        self.mesh = mesh

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies, one for each replica of this process.

        If the array is sharded, all processes must read it together.
        """
        if self.mesh is None:
            return tuple(data for _, data in local_shards(self.array))
        return _copies(self.array, self.mesh)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.array, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Mirrored(shape={np.shape(self.array)})"

    def __str__(self) -> str:
        """Returns the value as text."""
        return f"Mirrored:{_format(self.array)}"


def _format(value: Array) -> str:
    if isinstance(value, Tracer):
        return str(value)
    return np.array2string(np.asarray(value), separator=", ")


jax.tree_util.register_pytree_node(
    PerReplica,
    lambda value: (value.arrays, (value.layout, value.shapes)),
    lambda kept, arrays: (
        PerReplica(arrays)
        if kept[0] == PARTS
        else PerReplica.of(arrays[0], kept[0], shapes=kept[1])
    ),
)
jax.tree_util.register_pytree_node(
    Mirrored,
    lambda value: ((value.array,), value.mesh),
    lambda mesh, arrays: Mirrored(arrays[0], mesh),
)


def _copies(array: jax.Array, mesh: ReplicaMesh) -> tuple[Any, ...]:
    if not array.sharding.is_fully_replicated:
        gather = jax.jit(list, out_shardings=[mesh.whole])
        (array,) = dispatch(mesh, gather, [array])
    parts = {next(iter(p.devices())): p for _, p in local_shards(array)}
    cores = mesh.cores_per_replica
    copies = []
    for replica in mesh.local_replicas:
        devices = mesh.devices[replica * cores : (replica + 1) * cores]
        copies.append(next(parts[d] for d in devices if d in parts))
    return tuple(copies)


def check_home(value: PerReplica, mesh: ReplicaMesh) -> None:
    """Raises ValueError unless a value belongs to the strategy of `mesh`."""
    if value.layout == LOCAL:
        return
    if value.layout == PARTS:
        count = len(value.arrays)
        is_ours = count == mesh.num_replicas
    else:
        devices = value.arrays[0].sharding.device_set
        # A replica has one component, even if it has several cores.
        count = len(devices) // mesh.cores_per_replica
        is_ours = devices == set(mesh.devices)
    if not is_ours:
        raise ValueError(
            "A per-replica value must have one component for each replica and "
            "be used with the strategy whose `run` returned it. Received: "
            f"{count} components for {mesh.num_replicas} replicas, or other "
            "devices. Use the strategy that returned it, or create it with "
            "`experimental_distribute_values_from_function`."
        )


def is_distributed(value: object) -> bool:
    """Returns whether a leaf of a nest is a distributed value."""
    return isinstance(value, DistributedValues)


def local_shards(array: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Returns this process's shards of an array as pairs (index, data).

    Unlike `addressable_shards`, it also works in a process with one device if
    `device_put` has spread the array over several processes (jax 0.10).
    """
    sharding = array.sharding
    if len(sharding.addressable_devices) == 1 and sharding.is_fully_replicated:
        return [((slice(None),) * array.ndim, array.addressable_data(0))]
    return [(shard.index, shard.data) for shard in array.addressable_shards]


def set_apart(array: jax.Array) -> jax.Array:
    """Returns a distinct array object that shares the buffers of `array`.

    If nothing else refers to an array object, a step donates its buffers;
    otherwise it copies them first. A step can still donate the buffers of
    `array`, so copy them to the host before the next step. An array that is
    replicated in one process is returned as the copy on its first device, the
    fastest to read. For any other array, the `addressable_shards` of the result
    can be read (see `local_shards`).
    """
    sharding = array.sharding
    if sharding.is_fully_replicated and sharding.is_fully_addressable:
        return array.addressable_data(0)
    parts = [part for _, part in local_shards(array)]
    if len(parts[0].sharding.device_set) > 1:
        # jax 0.10, if `device_put` has spread an array over several processes.
        (device,) = sharding.addressable_devices
        parts = [jax.device_put(np.asarray(parts[0]), device)]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, parts
    )


def select_components(nest: Tree) -> Tree:
    """Replaces each per-replica value in a nest with this replica's component.

    Returns:
      A nest of arrays that can be passed to a replica's function.
    """
    return jax.tree.map(
        lambda v: v.arrays[0] if isinstance(v, PerReplica) else v,
        nest,
        is_leaf=is_distributed,
    )


def pad_to(array: Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads an array to `shape` with zeros at the end of each dimension."""
    sizes = zip(array.shape, shape, strict=True)
    return jax.numpy.pad(array, [(0, new - old) for old, new in sizes])


def cut(array: Array, shape: tuple[int, ...]) -> Array:
    """Cuts an array to `shape` by removing entries at the dimensions' ends."""
    return array[tuple(map(slice, shape))]


def stack_replicas(parts: Sequence[Any], mesh: ReplicaMesh) -> jax.Array:
    """Stacks arrays into one array whose entry i is on replica i.

    Args:
      parts: The entries of this process's replicas, all of the same shape.
      mesh: The replicas.
    """
    cores, local = mesh.cores_per_replica, mesh.split.addressable_devices
    shards = [
        jax.device_put(jax.numpy.asarray(part)[None], device)
        for part, replica in zip(parts, mesh.local_replicas, strict=True)
        for device in mesh.devices[replica * cores : (replica + 1) * cores]
        if mesh.num_processes == 1 or device in local
    ]
    shape = (mesh.num_replicas, *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, mesh.split, shards)


def as_reduce_op(op: object) -> ReduceOp:
    """Converts a name to a `ReduceOp`.

    Args:
      op: A `ReduceOp`, or its name (case-insensitive).

    Raises:
      ValueError: if there is no such `ReduceOp`.
    """
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(str(op).upper())
    except ValueError:
        raise ValueError(
            f"{op!r} is not a valid ReduceOp. Pass 'SUM' or 'MEAN'."
        ) from None

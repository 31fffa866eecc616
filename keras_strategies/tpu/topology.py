"""Topology: the coordinates and tasks of a TPU slice's cores."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from keras_strategies.cluster.exchange.message_forms import load_form
from keras_strategies.tpu.device_groups import (
    Cell,
    IntArray,
    compute_box,
    get_chip,
    get_core,
    get_slice,
    has_coordinates,
    make_tpu_devices,
    read_integers,
)

_RANK = 4
# More cores than any slice has, to limit the size of a topology's arrays.
_MAX_CORES = 2**20
_FORMAT = "keras_strategies.tpu.Topology"
_MAX_CHARACTERS = 64 * _MAX_CORES


def _is_place(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_CORES


_PLACES = (_is_place,) * _RANK
_CONTENT = {
    "format": lambda value: value == _FORMAT,
    "version": lambda value: type(value) is int and value == 1,
    "mesh_shape": _PLACES,
    "device_coordinates": [[_PLACES]],
}


class Topology:
    """The cores of a TPU slice: their coordinates, tasks and ordinals.

    A core's coordinates are (x, y, z, core): the position of its chip in the
    slice, and the index of the core in the chip. A task is a process. An
    ordinal is the index of a device among the devices of its task.

    Args:
      serialized: The bytes that another topology's `serialized()` returned, or
        None. If passed, the other arguments are ignored. Differs from tf: the
        bytes are JSON, not a protocol buffer.
      mesh_shape: The number of cores in each dimension, (x, y, z, core).
      device_coordinates: The coordinates of every device, of shape
        (tasks, devices, 4).

    Raises:
      ValueError: if no argument is passed, a shape is wrong, coordinates are
        outside the mesh, two devices have the same coordinates, or
        `serialized` is not the result of `serialized()`.

    Example:
      ```python
      topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
      topology.mesh_shape
      ```
    """

    def __init__(
        self,
        serialized: bytes | str | None = None,
        mesh_shape: npt.ArrayLike | None = None,
        device_coordinates: npt.ArrayLike | None = None,
    ) -> None:
        if serialized is not None:
            mesh_shape, device_coordinates = _parse(serialized)
        self._mesh_shape = _check_mesh_shape(mesh_shape)
        self._device_coordinates = _check_coordinates(
            device_coordinates, self._mesh_shape
        )
        self._owners = _find_owners(self._device_coordinates)
        self._devices: dict[Cell, jax.Device] = {}

    @classmethod
    def from_devices(cls, devices: Iterable[jax.Device]) -> "Topology":
        """Returns the topology of JAX devices, with references to them.

        Each process is a task. Tasks are in the order of the processes'
        indices, and the devices of a task are in the order of their ids.
        Coordinates are relative to the lowest corner of the devices' bounding
        box. Devices without coordinates (CPUs, GPUs) are placed in a line
        along x, process by process.

        Args:
          devices: Devices of one slice, with the same number of devices from
            each process.

        Raises:
          ValueError: if `devices` is empty, the devices are from several
            slices, or processes have different numbers of devices.
        """
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
        _check_devices(devices)
        places = _compute_places(devices)
        tasks: dict[int, list[Cell]] = {}
        for device, place in zip(devices, places, strict=True):
            tasks.setdefault(device.process_index, []).append(place)
        topology = cls(
            mesh_shape=compute_box(places)[1],
            device_coordinates=list(tasks.values()),
        )
        topology._devices = dict(zip(places, devices, strict=True))
        return topology

    @classmethod
    def from_name(cls, name: str) -> "Topology":
        """Returns the topology of a slice such as "v5e:4x4", without a TPU.

        Programs can be compiled for its devices, but cannot run on them. This
        needs libtpu, which the extra `tpu` of this package installs.

        Args:
          name: The TPU's generation and the number of chips in each dimension,
            such as "v5e:4x4", "v5p:2x2x2", "v6e:4x4" or "tpu7x:2x2x1".

        Raises:
          ImportError: if libtpu is not installed.
          ValueError: if no such slice exists.
        """
        return cls.from_devices(make_tpu_devices(name))

    @property
    def mesh_shape(self) -> IntArray:
        """The number of cores in each dimension, (x, y, z, core)."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh, which is always four."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> IntArray:
        """The coordinates of every device, of shape (tasks, devices, 4)."""
        return self._device_coordinates

    @functools.cached_property
    def missing_devices(self) -> npt.NDArray[np.intp]:
        """The coordinates without a device, as an array of shape (n, 4)."""
        is_missing = np.ones(self._mesh_shape, dtype=bool)
        is_missing[tuple(self._device_coordinates.reshape(-1, _RANK).T)] = False
        missing = np.argwhere(is_missing)
        missing.flags.writeable = False
        return missing

    @property
    def num_tasks(self) -> int:
        """The number of tasks. Each task is a process."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the index of the task with the device at (x, y, z, core).

        Raises:
          IndexError: if the coordinates are outside the mesh.
          ValueError: if no device is at the coordinates. Differs from tf,
            which returns -1.
        """
        return self._find_owner(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the index, within its task, of the device at (x, y, z, core).

        Raises: see `task_ordinal_at_coordinates`.
        """
        return self._find_owner(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the TensorFlow device name of a device's host."""
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_format_job(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the TensorFlow name of the device at (x, y, z, core)."""
        task, device = self._find_owner(device_coordinates)
        return f"{_format_job(job)}/task:{task}/device:TPU:{device}"

    def device_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> jax.Device:
        """Returns the JAX device at (x, y, z, core).

        Raises:
          ValueError: if the topology was not made from devices, or no device
            is at the coordinates.
          IndexError: if the coordinates are outside the mesh.
        """
        self._find_owner(device_coordinates)
        if not self._devices:
            raise ValueError(
                "The topology must be created from devices, not from "
                f"coordinates. Received: {self!r}. Create it with "
                "`Topology.from_devices(jax.devices())` or "
                "`Topology.from_name(name)`."
            )
        return self._devices[tuple(int(i) for i in device_coordinates)]

    def serialized(self) -> bytes:
        """Returns the topology as JSON, for `Topology(serialized=...)`.

        References to JAX devices are omitted. Differs from tf: the result is
        not a protocol buffer.
        """
        content = {
            "format": _FORMAT,
            "version": 1,
            "mesh_shape": self._mesh_shape.tolist(),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(content).encode()

    def _find_owner(self, coordinates: Sequence[int]) -> tuple[int, int]:
        cell = read_integers("device_coordinates", coordinates)
        is_inside = cell.shape == (_RANK,) and bool(
            ((cell >= 0) & (cell < self._mesh_shape)).all()
        )
        if not is_inside:
            raise IndexError(
                "Coordinates must be four integers, each at least 0 and less "
                "than the mesh's size in that dimension. Received: "
                f"device_coordinates={cell.tolist()}, "
                f"mesh_shape={self._mesh_shape.tolist()}."
            )
        place = tuple(cell.tolist())
        if place not in self._owners:
            raise ValueError(
                "No device is at these coordinates. Received: "
                f"device_coordinates={place}. Skip the coordinates in "
                "`missing_devices`."
            )
        return self._owners[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return (
            np.array_equal(self._mesh_shape, other._mesh_shape)
            and self._owners == other._owners
            and self._devices == other._devices
        )

    def __hash__(self) -> int:
        return hash((tuple(self._mesh_shape.tolist()), self.num_tasks))

    def __repr__(self) -> str:
        return (
            f"<Topology mesh_shape={self._mesh_shape.tolist()} "
            f"num_tasks={self.num_tasks} "
            f"num_tpus_per_task={self.num_tpus_per_task}>"
        )


def _check_mesh_shape(value: object) -> IntArray:
    shape = read_integers("mesh_shape", value)
    is_valid = shape.shape == (_RANK,) and (shape > 0).all()
    if not is_valid or shape.prod(dtype=float) > _MAX_CORES:
        raise ValueError(
            "`mesh_shape` must be four positive integers: x, y, z, core, of at "
            f"most {_MAX_CORES} cores. Received: {shape.tolist()}."
        )
    return shape


def _check_coordinates(value: object, mesh_shape: IntArray) -> IntArray:
    coordinates = read_integers("device_coordinates", value)
    if coordinates.ndim != 3 or coordinates.shape[2] != _RANK:
        raise ValueError(
            "`device_coordinates` must have the shape (tasks, devices, 4). "
            f"Received: the shape {coordinates.shape}."
        )
    is_outside = ((coordinates < 0) | (coordinates >= mesh_shape)).any(axis=2)
    if is_outside.any():
        raise ValueError(
            "`device_coordinates` must be inside `mesh_shape`. Received: "
            f"mesh_shape={mesh_shape.tolist()} and a device at "
            f"{coordinates[is_outside][0].tolist()}."
        )
    return coordinates


def _find_owners(coordinates: IntArray) -> dict[Cell, tuple[int, int]]:
    """Returns a dict from each device's coordinates to (task, ordinal)."""
    owners = {
        tuple(place): (task, ordinal)
        for task, devices in enumerate(coordinates.tolist())
        for ordinal, place in enumerate(devices)
    }
    if len(owners) * _RANK < coordinates.size:
        raise ValueError(
            "Devices must have different coordinates. Received: "
            f"device_coordinates={coordinates.tolist()!r:.200}."
        )
    return owners


def _check_devices(devices: Sequence[jax.Device]) -> None:
    slices = sorted({get_slice(device) for device in devices})
    if len(slices) > 1:
        raise ValueError(
            "The devices of a topology must belong to one slice, because each "
            "slice has separate coordinates. Received: devices of the slices "
            f"{slices}. Create a topology for each `slice_index`."
        )


def _compute_places(devices: Sequence[jax.Device]) -> list[Cell]:
    if not all(has_coordinates(device) for device in devices):
        return [(i, 0, 0, 0) for i in range(len(devices))]
    chips = [(*get_chip(device), get_core(device)) for device in devices]
    corner, _ = compute_box(chips)
    return [
        tuple(i - low for i, low in zip(chip, corner, strict=True))
        for chip in chips
    ]


def _parse(serialized: bytes | str) -> tuple[Any, Any]:
    try:
        content = load_form(
            serialized, _CONTENT, max_characters=_MAX_CHARACTERS
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`serialized` must be the JSON of a topology, version 1. Received: "
            f"{serialized!r:.80}, with this problem: {error}. Pass the result "
            "of `Topology.serialized()`; those of TensorFlow are not supported."
        ) from None
    return content["mesh_shape"], content["device_coordinates"]


def _format_job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"

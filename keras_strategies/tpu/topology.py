"""Topology: where the cores of a TPU slice are, and whose they are."""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.exchange.message_forms import load_form
from keras_strategies.tpu.coordinates import (
    Cell,
    IntArray,
    box_of,
    chip_of,
    core_of,
    has_coordinates,
    read_integers,
    slice_of,
)
from keras_strategies.tpu.topology_devices import devices_by_name

_RANK = 4
# More than any slice has; the arrays of a topology stay small.
_MOST_CORES = 2**20
_FORMAT = "keras_strategies.tpu.Topology"
_MOST_CHARACTERS = 64 * _MOST_CORES


def _is_place(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_CORES


_PLACES = (_is_place,) * _RANK
_CONTENT = {
    "format": lambda value: value == _FORMAT,
    "version": lambda value: type(value) is int and value == 1,
    "mesh_shape": _PLACES,
    "device_coordinates": [[_PLACES]],
}


class Topology:
    """The cores of a TPU slice: their coordinates, tasks and ordinals.

    A core's coordinates are (x, y, z, core): its chip's place in the slice
    and which core of the chip it is. A task is a process; an ordinal counts
    the devices of a task.

    Args:
      serialized: What `serialized()` of a topology returned, or None. If
        given, the other arguments are ignored. Differs from tf: JSON, no
        protocol buffer.
      mesh_shape: The number of cores in each dimension, (x, y, z, core).
      device_coordinates: Coordinates of every device, (tasks, devices, 4).

    Raises:
      TypeError: nothing is given.
      ValueError: a wrong shape, coordinates outside the mesh, or two devices
        at the same coordinates; `serialized` is not ours.

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
        """Returns the topology of jax devices, which it keeps.

        A process is a task, in the order of the processes' indices; its
        devices are in the order of their ids. Coordinates count from the
        lowest corner of the box around the devices. Devices without
        coordinates (CPUs, GPUs) lie in a line along x, process by process.

        Args:
          devices: Devices of one slice, equally many of each process.

        Raises:
          ValueError: no devices, one twice, several slices, or processes
            with different numbers of devices.
        """
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
        _check_devices(devices)
        places = _places_of(devices)
        tasks: dict[int, list[Cell]] = {}
        for device, place in zip(devices, places, strict=True):
            tasks.setdefault(device.process_index, []).append(place)
        topology = cls(
            mesh_shape=box_of(places)[1],
            device_coordinates=list(tasks.values()),
        )
        topology._devices = dict(zip(places, devices, strict=True))
        return topology

    @classmethod
    def from_name(cls, name: str) -> "Topology":
        """Returns the topology of a TPU slice by its name, without a TPU.

        The devices it keeps can be compiled for, not run on. Needs libtpu,
        the extra `tpu`.

        Args:
          name: Generation and number of chips in each dimension: "v5e:4x4",
            "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x1".

        Raises:
          ImportError: libtpu is not installed.
          ValueError: no such slice.
        """
        return cls.from_devices(devices_by_name(name))

    @property
    def mesh_shape(self) -> IntArray:
        """The number of cores in each dimension, (x, y, z, core)."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions: four."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> IntArray:
        """The coordinates of every device, of shape (tasks, devices, 4)."""
        return self._device_coordinates

    @functools.cached_property
    def missing_devices(self) -> npt.NDArray[np.intp]:
        """Coordinates in the mesh where no device is, of shape (n, 4)."""
        is_missing = np.ones(self._mesh_shape, dtype=bool)
        is_missing[tuple(self._device_coordinates.reshape(-1, _RANK).T)] = False
        missing = np.argwhere(is_missing)
        missing.flags.writeable = False
        return missing

    @property
    def num_tasks(self) -> int:
        """The number of tasks, which are processes."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the task of the device at (x, y, z, core).

        Raises:
          IndexError: the coordinates are outside the mesh.
          ValueError: no device is there. Differs from tf: it returns -1.
        """
        return self._owner_at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the number of the device at (x, y, z, core) in its task.

        Raises: see `task_ordinal_at_coordinates`.
        """
        return self._owner_at(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns tf's name of the host of the device at (x, y, z, core)."""
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_job(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns tf's name of the device at (x, y, z, core)."""
        task, device = self._owner_at(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{device}"

    def device_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> jax.Device:
        """Returns the jax device at (x, y, z, core).

        Raises:
          ValueError: the topology was not made from devices, or none is there.
          IndexError: the coordinates are outside the mesh.
        """
        self._owner_at(device_coordinates)
        if not self._devices:
            raise ValueError(
                "Only a topology made from devices knows them. Received: a "
                f"topology made from coordinates: {self!r}. Make it with "
                "`Topology.from_devices(jax.devices())` or "
                "`Topology.from_name(name)`."
            )
        return self._devices[tuple(int(i) for i in device_coordinates)]

    def serialized(self) -> bytes:
        """Returns the topology as JSON, for `Topology(serialized=...)`.

        The jax devices are left out. Differs from tf: no protocol buffer.
        """
        content = {
            "format": _FORMAT,
            "version": 1,
            "mesh_shape": self._mesh_shape.tolist(),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(content).encode()

    def _owner_at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        given = read_integers("device_coordinates", coordinates)
        is_inside = given.shape == (_RANK,) and bool(
            ((given >= 0) & (given < self._mesh_shape)).all()
        )
        if not is_inside:
            raise IndexError(
                "Coordinates are four integers, each from 0 to the mesh's size"
                f" - 1. Received: device_coordinates={given.tolist()}, "
                f"mesh_shape={self._mesh_shape.tolist()}."
            )
        place = tuple(given.tolist())
        if place not in self._owners:
            raise ValueError(
                "No device is at these coordinates. Received: "
                f"device_coordinates={place}. Leave out the coordinates in "
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
    if shape.shape != (_RANK,) or (shape < 1).any():
        raise ValueError(
            "`mesh_shape` is four positive integers: x, y, z, core. Received: "
            f"{shape.tolist()}."
        )
    if shape.prod(dtype=float) > _MOST_CORES:
        raise ValueError(
            f"A topology has at most {_MOST_CORES} cores. Received: "
            f"mesh_shape={shape.tolist()}."
        )
    return shape


def _check_coordinates(value: object, mesh_shape: IntArray) -> IntArray:
    coordinates = read_integers("device_coordinates", value)
    if coordinates.ndim != 3 or coordinates.shape[2] != _RANK:
        raise ValueError(
            "`device_coordinates` has the shape (tasks, devices, 4). Received "
            f"the shape {coordinates.shape}."
        )
    is_outside = ((coordinates < 0) | (coordinates >= mesh_shape)).any(axis=2)
    if is_outside.any():
        raise ValueError(
            "Every device is in the mesh. Received: mesh_shape="
            f"{mesh_shape.tolist()} and a device at "
            f"{coordinates[is_outside][0].tolist()}."
        )
    return coordinates


def _find_owners(coordinates: IntArray) -> dict[Cell, tuple[int, int]]:
    """Task and ordinal by coordinates."""
    owners: dict[Cell, tuple[int, int]] = {}
    for task, devices in enumerate(coordinates.tolist()):
        for ordinal, place in enumerate(devices):
            other = owners.setdefault(tuple(place), (task, ordinal))
            if other != (task, ordinal):
                raise ValueError(
                    "Two devices cannot be at the same coordinates. Received: "
                    f"device_coordinates with {place} for device {other[1]} "
                    f"of task {other[0]} and device {ordinal} of task {task}."
                )
    return owners


def _check_devices(devices: Sequence[jax.Device]) -> None:
    if not devices:
        raise ValueError(
            "A topology needs at least one device. Received: devices=(). Pass "
            "`jax.devices()`."
        )
    if len(set(devices)) != len(devices):
        raise ValueError(
            "A topology holds each device once. Received: "
            f"{[str(device) for device in devices]}. Name each once."
        )
    slices = sorted({slice_of(device) for device in devices})
    if len(slices) > 1:
        raise ValueError(
            "A topology is of one slice: coordinates are counted in each "
            f"anew. Received: devices of slices {slices}. Make one for the "
            "devices of each `slice_index`."
        )
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        raise ValueError(
            "Every process has equally many devices. Received: number of "
            f"devices by process {dict(counts)}. Choose as many of each."
        )


def _places_of(devices: Sequence[jax.Device]) -> list[Cell]:
    if not all(has_coordinates(device) for device in devices):
        return [(i, 0, 0, 0) for i in range(len(devices))]
    chips = [(*chip_of(device), core_of(device)) for device in devices]
    corner, _ = box_of(chips)
    return [
        tuple(i - low for i, low in zip(chip, corner, strict=True))
        for chip in chips
    ]


def _parse(serialized: bytes | str) -> tuple[Any, Any]:
    cure = "Pass what `Topology.serialized()` returned; tf's are not read."
    kinds = bytes | str
    check_type("`serialized`", serialized, kinds, "bytes or a str", cure)
    try:
        content = load_form(
            serialized, _CONTENT, max_characters=_MOST_CHARACTERS
        )
    except ValueError as error:
        raise ValueError(
            "`serialized` is JSON of a topology, version 1. Received: "
            f"{serialized[:80]!r}, of which {error}. {cure}"
        ) from None
    return content["mesh_shape"], content["device_coordinates"]


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"

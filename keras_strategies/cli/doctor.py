"""`keras-strategies doctor`: what is on this machine, and advice."""

import collections
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence

import jax
import keras
import rich.box
from rich.console import Console
from rich.table import Table

import keras_strategies

# What is imported by name, and the extra that brings it.
OPTIONAL_PACKAGES = {
    "tensorflow": "tensorflow",
    "tensorboardX": "tensorboard",
    "grain": "grain",
    "torch": "torch",
    "sklearn": "examples",
}
VIRTUAL_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count=4"


def doctor() -> int:
    """Prints the table of facts and the advice. Starts JAX's devices.

    Returns:
      The exit status: 0, or 1 if JAX could not start its devices.
    """
    console = Console()
    try:
        devices, fault = jax.devices(), None
    except RuntimeError as error:
        devices, fault = [], str(error)
    table = Table(box=rich.box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in [
        *versions(),
        ("backend", jax.default_backend() if devices else "none"),
        ("devices", describe_devices(devices)),
        *environment(os.environ),
        *optional_packages(),
    ]:
        table.add_row(name, value)
    console.print(table)
    for line in advice(devices, fault, os.environ, os.cpu_count() or 1):
        console.print(f"- {line}", markup=False, highlight=False)
    return 0 if fault is None else 1


def versions() -> list[tuple[str, str]]:
    """What is installed, as rows of a table."""
    return [
        ("python", platform.python_version()),
        ("keras_strategies", keras_strategies.__version__),
        ("keras", keras.__version__),
        ("jax", jax.__version__),
        ("jaxlib", importlib.metadata.version("jaxlib")),
    ]


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """One line for each kind of device, with how many there are."""
    kinds = collections.Counter((d.platform, d.device_kind) for d in devices)
    lines = [
        f"{count} x {name}" + (f" ({kind})" if kind != name else "")
        for (name, kind), count in kinds.items()
    ]
    return "\n".join(lines) or "none"


def environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that change what happens, as rows of a table.

    TF_CONFIG is not shown: it holds the addresses of a cluster.
    """
    return [
        ("KERAS_BACKEND", environ.get("KERAS_BACKEND", "not set")),
        ("KERAS_NNX_ENABLED", environ.get("KERAS_NNX_ENABLED", "not set")),
        ("TF_CONFIG", "set" if environ.get("TF_CONFIG") else "not set"),
    ]


def optional_packages() -> list[tuple[str, str]]:
    """Which extras are there, as rows of a table. Imports none of them."""
    return [
        (
            package,
            "installed"
            if importlib.util.find_spec(package)
            else f"not installed (extra '{extra}')",
        )
        for package, extra in OPTIONAL_PACKAGES.items()
    ]


def advice(
    devices: Sequence[jax.Device],
    fault: str | None,
    environ: Mapping[str, str],
    num_cores: int,
) -> list[str]:
    """What the user may want to change.

    Args:
      devices: The devices JAX found.
      fault: Why it could not find them, if so.
      environ: The environment variables.
      num_cores: Number of cores of the CPU.

    Returns:
      Sentences, the most important one first.
    """
    lines = []
    if fault is not None:
        lines.append(
            f"JAX could not start its devices: {fault}. Check the driver, or "
            "set JAX_PLATFORMS=cpu to use the CPU."
        )
    elif len(devices) == 1 and devices[0].platform == "cpu":
        lines.append(
            "JAX sees one CPU device, so a strategy has one replica. To try "
            f"several, start Python with {VIRTUAL_DEVICES}."
        )
    elif len(devices) == 1:
        lines.append("JAX sees one device, so a strategy has one replica.")
    elif devices[0].platform == "cpu" and len(devices) > num_cores:
        lines.append(
            f"{len(devices)} virtual CPU devices share {num_cores} cores: "
            "right for trying a script, no faster than fewer devices."
        )
    if environ.get("TF_CONFIG"):
        lines.append(
            "TF_CONFIG is set. The strategies of this version run on one "
            "machine and do not read it."
        )
    if importlib.util.find_spec("tensorflow"):
        lines.append(
            "TensorFlow is installed. keras_strategies imports it only for "
            "tf.data; `keras.utils.set_random_seed` and `model.save` import "
            "it too, which takes seconds."
        )
    return lines or ["Nothing to change."]

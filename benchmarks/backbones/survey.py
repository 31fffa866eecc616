"""How much of a keras-hub backbone the cores of a replica share."""

import collections
import contextlib
import dataclasses
import importlib
import math
import re
from typing import Any

import jax.numpy as jnp
import keras_hub

import keras_strategies as ks
from benchmarks.backbones.configs import OTHERS, TEXT, Part

SHOWN_SHARE = 0.005
_MODULES = {
    "BLIP2CustomOPT": "blip2.blip2_custom_opt",
    "BLIP2QFormer": "blip2.blip2_qformer",
    "BLIP2VisionEncoder": "blip2.blip2_vision_encoder",
    "VAEBackbone": "vae.vae_backbone",
}
"""Modules of keras-hub's classes that it does not export."""
_WITH_VALUES = {"DINOV2", "DepthAnything", "SAM3PromptableConcept"}
"""They read an initial value when they are built, to interpolate positions."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """Equal variables of equal layers, which every core holds whole.

    Attributes:
      name: The end of their paths, without numbers.
      shape: Of each.
      share: Of the bytes of all weights.
      why: Why they are not divided.
    """

    name: str
    shape: tuple[int, ...]
    share: float
    why: str


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the layout of a backbone divides.

    Attributes:
      name: Of the backbone's class, without "Backbone".
      size: Bytes of weights.
      divided: The share of the bytes that the cores divide.
      whole: What stays whole, the largest first.
    """

    name: str
    size: int
    divided: float
    whole: tuple[Whole, ...]


def build(name: str) -> Any:
    """The backbone, without values where it can be built so."""
    is_real = name in _WITH_VALUES
    with contextlib.nullcontext() if is_real else ks.abstract():
        return _make(Part(f"{name}Backbone", (TEXT | OTHERS)[name]))


def survey(name: str, cores: int) -> Survey:
    model = build(name)
    layout_map = ks.experimental.transformer_layout(model, cores)
    sizes: dict[tuple[str, tuple[int, ...]], int] = collections.Counter()
    total = 0
    for variable in model.variables:
        shape = tuple(variable.shape)
        size = math.prod(shape) * jnp.dtype(variable.dtype).itemsize
        total += size
        if not any(_find_axes(layout_map, variable.path, shape)):
            end = "/".join(variable.path.split("/")[-3:])
            sizes[re.sub(r"_?\d+", "", end), shape] += size
    whole = [
        Whole(end, shape, size / total, _explain(end, shape, cores))
        for (end, shape), size in sizes.items()
    ]
    whole.sort(key=lambda w: -w.share)
    return Survey(name, total, 1 - sum(sizes.values()) / total, tuple(whole))


def _make(value: Any) -> Any:
    if not isinstance(value, Part):
        return value
    for module in (keras_hub.models, keras_hub.layers):
        if hasattr(module, value.name):
            break
    else:
        path = f"keras_hub.src.models.{_MODULES[value.name]}"
        module = importlib.import_module(path)
    arguments = {key: _make(part) for key, part in value.sizes.items()}
    return getattr(module, value.name)(**arguments)


def _find_axes(layout_map: Any, path: str, shape: tuple[int, ...]) -> Any:
    for pattern, axes in layout_map.items():
        if re.fullmatch(pattern, path):
            return axes(shape) if callable(axes) else axes
    return ()


def _explain(end: str, shape: tuple[int, ...], cores: int) -> str:
    if len(shape) < 2:
        return "a vector"
    if "position" in end:
        return "positions"
    if not any(size % cores == 0 for size in shape):
        return f"no dimension is a multiple of {cores}"
    if re.search(r"patch|conv", end):
        return "a convolution"
    if re.search(r"attention|attn|mha", end):
        return f"heads are no multiple of {cores}"
    return "small"

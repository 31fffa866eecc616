"""A question to a process of `keras-strategies plan`, and its answer."""

import dataclasses
import json
import re
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # libtpu asks nobody what machine this is, and several use it at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Variables of the processes that compile for slices that are not there."""
MAX_ANSWER_BYTES = 1_000_000
_BATCH = re.compile(
    r"(?P<sizes>\d{1,9}(x\d{1,9}){0,7}):(?P<dtype>[a-z]+\d{0,2})"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A candidate of one process.

    Attributes:
      script: The script's path, or a module's name; "" for a function.
      is_module: Whether the script is a module.
      function: A function that makes the model, "module:function".
      batch: Shapes of what it trains on, as "8x2048:int32": x and y.
      arguments: Those of the script.
      topology: The slice's name.
      layout: How the model lies on it, in words.
      is_default: Whether nobody named the layout: it may be left out.
      is_alone: Whether there is no other candidate.
      scale: "replica" or "global": whose rows the batches have.
      effort: "auto", "low" or "full".
      verify: See `Strategy.plan`.
      whole: See `Strategy.plan`.
      cache: See `Strategy.plan`.
    """

    script: str = ""
    is_module: bool = False
    function: str = ""
    batch: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    topology: str
    layout: str
    is_default: bool = False
    is_alone: bool = False
    scale: str = "global"
    effort: str = "auto"
    verify: bool = False
    whole: bool = False
    cache: bool = True

    @property
    def name(self) -> str:
        """The slice and the layout."""
        return f"{self.topology} {self.layout}"

    def to_text(self) -> str:
        """As the command line of the process has it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Request":
        """The request that a command line has."""
        found = json.loads(text)
        for name in ("batch", "arguments"):
            found[name] = tuple(found[name])
        return cls(**found)


def shape_and_dtype(text: str) -> tuple[tuple[int, ...], str]:
    """An array's shape and dtype in words: "8x2048:int32".

    Raises:
      ValueError: it is none.
    """
    match = _BATCH.fullmatch(text)
    sizes = tuple(map(int, match["sizes"].split("x"))) if match else ()
    if match is None or 0 in sizes:
        raise ValueError(
            "A batch is sizes and a dtype. Received: "
            f"{text!r}. Write for example 8x2048:int32."
        )
    return sizes, match["dtype"]


def answer_of(
    raw: bytes, names: tuple[str, ...] = ("step", "error", "ended")
) -> dict[str, Any] | None:
    """A process's last answer, by its name; None: it gave none that is one.

    Args:
      raw: Lines of JSON, of which the last one counts.
      names: Those that it may have.
    """
    lines = raw.splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, dict) or len(found) != 1:
        return None
    return found if set(found) <= set(names) else None

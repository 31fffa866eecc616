"""Messages between `keras-strategies plan` and its child processes."""

import dataclasses
import json
import re
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # libtpu must not query a metadata server for the machine's type, and must
    # allow several processes to use it at the same time.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment variables of the processes that compile for absent devices."""
_DTYPES = "bool|bfloat16|float(16|32|64)|u?int(8|16|32|64)"
_BATCH = re.compile(
    rf"(?P<sizes>\d{{1,9}}(x\d{{1,9}}){{0,7}}):(?P<dtype>{_DTYPES})", re.ASCII
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A candidate (topology and layout) for a child process, with all options.

    Attributes:
      script: The path of the script, or the name of a module. "" if `function`
        is set.
      is_module: Whether the script is a module.
      function: A function that creates the model, as "module:function".
      batch: The shape and dtype of x and of y, each such as "8x2048:int32".
      arguments: The script's arguments.
      topology: The topology's name.
      layout: The name of the model's layout.
      is_default: Whether the layout is one of the defaults and was not
        requested by the user, so that the table may leave it out.
      is_alone: Whether this is the only candidate.
      scale: "replica" if the script's batches are for one replica, "global" if
        they are global batches.
      effort: How thoroughly to compile: "auto", "low" or "full".
      verify: See `Strategy.plan`.
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
    cache: bool = True

    @property
    def name(self) -> str:
        """The names of the topology and the layout."""
        return f"{self.topology} {self.layout}"

    def to_text(self) -> str:
        """Returns the request as JSON, for the child process's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Request":
        """Parses the text that `to_text` returned."""
        fields = json.loads(text)
        for name in ("batch", "arguments"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def parse_shape_and_dtype(text: str) -> tuple[tuple[int, ...], str]:
    """Parses an array's shape and dtype, such as "8x2048:int32".

    Raises:
      ValueError: if `text` is not in this format.
    """
    match = _BATCH.fullmatch(text)
    sizes = tuple(map(int, match["sizes"].split("x"))) if match else ()
    if match is None or 0 in sizes:
        raise ValueError(
            "A batch must be specified as sizes and a dtype. Received: "
            f"{text!r:.100}. Pass, for example, 8x2048:int32."
        )
    return sizes, match["dtype"]


def parse_answers(raw: bytes) -> dict[str, Any]:
    """Returns the entries of all answers that a child process has written.

    Args:
      raw: Lines of JSON, each with a dict. The last line may be incomplete.
    """
    lines = raw.split(b"\n")[:-1]
    return {k: v for line in lines for k, v in json.loads(line).items()}

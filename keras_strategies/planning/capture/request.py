"""Messages between `keras-strategies plan` and its child processes."""

import dataclasses
import json

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A candidate (topology and layout) for a child process, with all options.

    Attributes:
      script: The path of the script, or the name of a module.
      is_module: Whether the script is a module.
      arguments: The script's arguments.
      topology: The topology's name.
      layout: The name of the model's layout.
      is_default: Whether the layout is one of the defaults and was not
        requested by the user, so that the table may leave it out.
      scale: "replica" if the script's batches are for one replica, "global" if
        they are global batches.
      effort: How thoroughly to compile: "auto", "low" or "full".
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    topology: str
    layout: str
    is_default: bool = False
    scale: str = "global"
    effort: str = "auto"

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
        return cls(**fields | {"arguments": tuple(fields["arguments"])})

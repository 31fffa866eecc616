"""The errors of a checkpoint that is not as it was written."""

import os
import pathlib

_MAX_SHOWN = 160
_CURE = (
    "It is not restored. Use an earlier step, restore this folder from a copy, "
    "or delete it."
)


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was saved, and is not restored.

    Attributes:
      path: The checkpoint's folder; None if it is not known.
      file: The file at fault, relative to it; None for the whole.
      fault: What is wrong, in short: for a table.

    Example:
      ```python
      manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
      manager.save(step=100)
      manager.close()
      try:
          manager.restore(step=200)
      except ks.checkpoint.DamagedCheckpoint as error:
          print(error.path, error.fault)
      ```
    """

    def __init__(
        self,
        message: str,
        *,
        path: pathlib.Path | None = None,
        file: str | None = None,
        fault: str = "",
    ):
        super().__init__(message)
        self.path = path
        self.file = file
        self.fault = fault or message


def damaged(
    path: str | os.PathLike[str],
    file: str | None,
    fault: str,
    cure: str = _CURE,
) -> DamagedCheckpoint:
    """The error for a checkpoint.

    Args:
      path: The checkpoint's folder.
      file: The file or folder at fault, relative to it; None for the whole.
      fault: What is wrong with it: "its checksum differs".
      cure: What to do.
    """
    short = fault if file is None else f"{shown(file)}: {fault}"
    return DamagedCheckpoint(
        f"The checkpoint {shown(os.fspath(path))} is damaged: {short}. {cure}",
        path=pathlib.Path(path),
        file=file,
        fault=short,
    )


def shown(name: str) -> str:
    """A name for a text: as it is, or its repr if it has odd characters."""
    if name.isprintable() and name.isascii() and " " not in name and name:
        return name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
    text = ascii(name[: _MAX_SHOWN + 1])
    return text if len(name) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."

"""Errors for corrupted checkpoints."""

import os
import pathlib

_MAX_SHOWN = 160
_CURE = (
    "This checkpoint is not restored. Use an earlier step, restore this folder "
    "from a copy, or delete it."
)


class DamagedCheckpoint(ValueError):
    """The error for a damaged checkpoint, which differs from what was saved.

    A damaged checkpoint is never restored.

    Attributes:
      path: The checkpoint's folder; None if unknown.
      file: The damaged file, relative to `path`; None if the folder itself is
        damaged or missing.
      fault: A short description of the damage, for a table.

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


def make_damage_error(
    path: str | os.PathLike[str],
    file: str | None,
    fault: str,
    cure: str = _CURE,
) -> DamagedCheckpoint:
    """Makes the error for a damaged checkpoint.

    Args:
      path: The checkpoint's folder.
      file: The damaged file or folder, relative to `path`; None for `path`
        itself.
      fault: A description of the damage, such as "its checksum differs".
      cure: Advice to the user, which ends the message.
    """
    short = fault if file is None else f"{quote_name(file)}: {fault}"
    name = quote_name(os.fspath(path))
    return DamagedCheckpoint(
        f"The checkpoint {name} is damaged: {short}. {cure}",
        path=pathlib.Path(path),
        file=file,
        fault=short,
    )


def quote_name(name: str) -> str:
    """Formats a name for a message; quotes it if it has unusual characters."""
    if name.isprintable() and name.isascii() and " " not in name and name:
        return name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
    text = ascii(name[: _MAX_SHOWN + 1])
    return text if len(name) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."

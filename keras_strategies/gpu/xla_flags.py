"""XLA's flags in the environment."""

import pathlib
import re
import shlex
from collections.abc import Mapping

XLA_FLAGS = "XLA_FLAGS"
DETERMINISM = "xla_gpu_deterministic_ops"
"""The option with which GPUs compute the same bits in every run."""

_BEGIN = r"(?<![\w-])-[\w-]*="
_QUOTED = re.compile(
    rf"""{_BEGIN}(?:"(?:\\.|[^"\\])*"|'[^']*')""", re.ASCII | re.DOTALL
)
_OPEN = re.compile(rf"""{_BEGIN}["']""", re.ASCII)


def read_flags(environ: Mapping[str, str]) -> str:
    """Returns XLA's flags, from the variable or from the file that it names.

    Like XLA, it takes a value that does not begin with "-" for a file's name.

    Args:
      environ: The environment variables.

    Raises:
      ValueError: if there is no such file, a quote is not closed, or a word is
        no flag.
    """
    flags = environ.get(XLA_FLAGS, "")
    if flags.lstrip()[:1] not in ("", "-"):
        flags = _read_file(flags)
    # XLA skips what follows an open quote or a word that is no flag.
    rest = _QUOTED.sub("- ", flags)
    if _OPEN.search(rest) or any(w[0] != "-" for w in rest.split()):
        raise ValueError(
            f"{XLA_FLAGS} must consist of flags that begin with '-', and each "
            f"quote must be closed. Received: {flags.strip()!r:.200}. Correct "
            "the variable, or unset it."
        )
    return flags.strip()


def _read_file(name: str) -> str:
    try:
        return pathlib.Path(name).read_text("utf-8", errors="surrogateescape")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{XLA_FLAGS} must contain flags, or name a file that contains "
            f"flags. Received: {name!r:.200}, which does not begin with '-' "
            f"and cannot be read ({type(error).__name__}). Correct the "
            "variable, or unset it."
        ) from error


def is_deterministic(environ: Mapping[str, str]) -> bool:
    """Returns whether XLA's flags ask for determinism on GPUs.

    Args:
      environ: The environment variables.
    """
    try:
        flags = shlex.split(read_flags(environ))
    except ValueError:
        return False
    # If a flag is repeated, XLA uses the last one.
    values = [
        value.lower()
        for name, _, value in (flag.partition("=") for flag in flags)
        if name == f"--{DETERMINISM}"
    ]
    return values[-1:] in (["true"], ["1"], [""])

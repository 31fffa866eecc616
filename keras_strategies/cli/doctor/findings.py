"""Data classes for the findings of `doctor`."""

import collections
import dataclasses
import enum

from keras_strategies.cluster.untrusted import escape_controls


class Level(enum.StrEnum):
    """The severity of a finding."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
      level: The severity. A fault prevents programs from running.
      text: A sentence that states the finding.
      fix: Advice on what to change; empty if nothing needs to change.
    """

    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "fix"):
            object.__setattr__(self, name, _safe(getattr(self, name)))


PROBLEMS = (Level.FAULT, Level.WARNING)
Row = tuple[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the report of `doctor`, about one subject.

    Attributes:
      title: The subject, such as "Cluster".
      rows: Pairs of a name and a value, for a table.
      findings: The results of the checks of this subject.
    """

    title: str
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        rows = tuple((_safe(name), _safe(value)) for name, value in self.rows)
        object.__setattr__(self, "rows", rows)

    @property
    def harmless(self) -> list[Finding]:
        """The findings that need no change; `problems` lists the others."""
        return [f for f in self.findings if f.level not in PROBLEMS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all checks.

    Attributes:
      host: The machine's name.
      when: The local time of the report, as text.
      process: "process 0 of 2", or empty outside of a cluster.
      is_chief: Whether this process prints the complete report.
      parts: The sections of the report, one for each subject.
    """

    host: str
    when: str
    process: str = ""
    is_chief: bool = True
    parts: tuple[Part, ...]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all parts, most severe first."""
        order = list(Level)
        findings = [f for part in self.parts for f in part.findings]
        return sorted(findings, key=lambda finding: order.index(finding.level))

    @property
    def problems(self) -> list[Finding]:
        """The findings that require a change, most severe first."""
        return [f for f in self.findings if f.level in PROBLEMS]

    @property
    def summary(self) -> str:
        """The number of problems, such as "1 fault, 2 warnings"."""
        levels = collections.Counter(finding.level for finding in self.problems)
        counts = [
            f"{count} {level}{'s' * (count > 1)}"
            for level, count in levels.items()
        ]
        return ", ".join(counts) or "nothing to change"

    @property
    def has_faults(self) -> bool:
        """Whether a finding prevents programs from running."""
        return any(f.level is Level.FAULT for f in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Returns the report as a dict that can be written as JSON."""
        return {
            "host": self.host,
            "when": self.when,
            "process": self.process,
            "summary": self.summary,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


def fault(text: str, fix: str) -> Finding:
    """Creates a finding about something that prevents programs from running."""
    return Finding(level=Level.FAULT, text=text, fix=fix)


def warning(text: str, fix: str) -> Finding:
    """Creates a finding about something that is probably not intended."""
    return Finding(level=Level.WARNING, text=text, fix=fix)


def note(text: str, fix: str = "") -> Finding:
    """Creates a finding that is only for information."""
    return Finding(level=Level.NOTE, text=text, fix=fix)


def good(text: str) -> Finding:
    """Creates a finding that confirms that something is correct."""
    return Finding(level=Level.GOOD, text=text)


def _safe(text: str) -> str:
    # Text may contain values from the environment, which must not send control
    # codes to a terminal.
    return escape_controls(text, keeps="\n")

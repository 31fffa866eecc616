"""The findings of `doctor`, before they are printed."""

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
      level: The severity. A fault keeps a program from running.
      text: The finding, in a sentence.
      fix: The advice; empty if nothing needs to change.
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
    """The part of a report about one subject.

    Attributes:
      title: The subject: "Cluster".
      rows: Names and values, for a table.
      findings: The results of its checks.
    """

    title: str
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        rows = tuple((_safe(name), _safe(value)) for name, value in self.rows)
        object.__setattr__(self, "rows", rows)

    @property
    def harmless(self) -> list[Finding]:
        """The findings that are not problems; a report lists problems once."""
        return [f for f in self.findings if f.level not in PROBLEMS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all checks.

    Attributes:
      host: The machine's name.
      when: The local time, as text.
      process: "process 0 of 2", or empty outside of a cluster.
      is_chief: Whether this process prints the complete report.
      parts: The parts, by subject.
    """

    host: str
    when: str
    process: str = ""
    is_chief: bool = True
    parts: tuple[Part, ...]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all parts, the worst first."""
        order = list(Level)
        findings = [f for part in self.parts for f in part.findings]
        return sorted(findings, key=lambda finding: order.index(finding.level))

    @property
    def problems(self) -> list[Finding]:
        """The findings that need a change, the worst first."""
        return [f for f in self.findings if f.level in PROBLEMS]

    @property
    def summary(self) -> str:
        """The number of problems: "1 fault, 2 warnings"."""
        levels = collections.Counter(finding.level for finding in self.problems)
        counts = [
            f"{count} {level}{'s' * (count > 1)}"
            for level, count in levels.items()
        ]
        return ", ".join(counts) or "nothing to change"

    @property
    def has_faults(self) -> bool:
        """Whether something keeps programs from running."""
        return any(f.level is Level.FAULT for f in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Returns the report in the form of JSON."""
        return {
            "host": self.host,
            "when": self.when,
            "process": self.process,
            "summary": self.summary,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


def fault(text: str, fix: str) -> Finding:
    """Makes a finding that keeps programs from running."""
    return Finding(level=Level.FAULT, text=text, fix=fix)


def warning(text: str, fix: str) -> Finding:
    """Makes a finding that may be intended but mostly is not."""
    return Finding(level=Level.WARNING, text=text, fix=fix)


def note(text: str, fix: str = "") -> Finding:
    """Makes a finding that is neither good nor bad."""
    return Finding(level=Level.NOTE, text=text, fix=fix)


def good(text: str) -> Finding:
    """Makes a finding that confirms a correct state."""
    return Finding(level=Level.GOOD, text=text)


def _safe(text: str) -> str:
    # Values from the environment must not send control codes to a terminal.
    return escape_controls(text, keeps="\n")

"""The findings of `doctor`, before they are shown."""

import collections
import dataclasses
import enum

from keras_strategies.cluster.untrusted import escape_controls


class Level(enum.StrEnum):
    """How bad a finding is."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      level: How bad it is. A fault keeps a program from running.
      text: What was found, in a sentence.
      fix: What to do about it; empty for what is good.
    """

    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "fix"):
            object.__setattr__(self, name, _safe(getattr(self, name)))


WRONG = (Level.FAULT, Level.WARNING)
Row = tuple[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What was found about one subject.

    Attributes:
      title: The subject: "Cluster".
      rows: Names and values, for a table.
      findings: What is good and bad about it.
    """

    title: str
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        rows = tuple((_safe(name), _safe(value)) for name, value in self.rows)
        object.__setattr__(self, "rows", rows)

    @property
    def calm(self) -> list[Finding]:
        """What is not wrong; the rest is told once, for all parts."""
        return [f for f in self.findings if f.level not in WRONG]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found.

    Attributes:
      host: The machine's name.
      when: The local time, as text.
      process: "process 0 of 2", or empty outside of a cluster.
      is_chief: Whether this process shows the whole report.
      parts: By subject.
    """

    host: str
    when: str
    process: str = ""
    is_chief: bool = True
    parts: tuple[Part, ...]

    @property
    def findings(self) -> list[Finding]:
        """Those of all parts, the worst first."""
        order = list(Level)
        found = [finding for part in self.parts for finding in part.findings]
        return sorted(found, key=lambda finding: order.index(finding.level))

    @property
    def wrong(self) -> list[Finding]:
        """What is to be changed, the worst first."""
        return [f for f in self.findings if f.level in WRONG]

    @property
    def summary(self) -> str:
        """ "1 fault, 2 warnings", or that there is nothing to change."""
        levels = collections.Counter(finding.level for finding in self.wrong)
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
        """The report as what JSON can hold."""
        return {
            "host": self.host,
            "when": self.when,
            "process": self.process,
            "summary": self.summary,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


def fault(text: str, fix: str) -> Finding:
    """A finding that keeps programs from running."""
    return Finding(level=Level.FAULT, text=text, fix=fix)


def warning(text: str, fix: str) -> Finding:
    """A finding that may be meant, and mostly is not."""
    return Finding(level=Level.WARNING, text=text, fix=fix)


def note(text: str, fix: str = "") -> Finding:
    """A finding that is neither good nor bad."""
    return Finding(level=Level.NOTE, text=text, fix=fix)


def good(text: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(level=Level.GOOD, text=text)


def _safe(text: str) -> str:
    # Much of it comes from the environment, and goes to a terminal.
    return escape_controls(text, keeps="\n")

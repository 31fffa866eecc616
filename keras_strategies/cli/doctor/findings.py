"""The findings of `doctor`, before they are shown."""

import dataclasses
import enum
from collections.abc import Iterable


class Level(enum.Enum):
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
    def summary(self) -> str:
        """ "1 fault, 2 warnings", or that there is nothing to change."""
        counts = [
            f"{count} {level.value}{'s' * (count > 1)}"
            for level in (Level.FAULT, Level.WARNING)
            if (count := count_of(self.findings, level))
        ]
        return ", ".join(counts) or "nothing to change"

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to change."""
        return not any(
            count_of(self.findings, level)
            for level in (Level.FAULT, Level.WARNING)
        )

    @property
    def has_faults(self) -> bool:
        """Whether something keeps programs from running."""
        return count_of(self.findings, Level.FAULT) > 0

    def as_dict(self) -> dict[str, object]:
        """The report as what JSON can hold."""
        return {
            "host": self.host,
            "when": self.when,
            "process": self.process,
            "summary": self.summary,
            "parts": [
                {
                    "title": part.title,
                    "rows": [list(row) for row in part.rows],
                    "findings": [
                        {"level": f.level.value, "text": f.text, "fix": f.fix}
                        for f in part.findings
                    ],
                }
                for part in self.parts
            ],
        }


def count_of(findings: Iterable[Finding], level: Level) -> int:
    """How many findings have a level."""
    return sum(finding.level is level for finding in findings)


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

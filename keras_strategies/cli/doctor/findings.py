"""Data classes for the findings of `doctor`."""

import collections
import dataclasses
import enum
import functools


class Level(enum.StrEnum):
    """The severity of a finding."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


PROBLEMS = (Level.PROBLEM, Level.WARNING)
Row = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      level: The severity. A problem prevents programs from running, and a
        warning is about something that is probably not intended.
      text: A sentence that states the finding.
      fix: Advice on what to change; empty if nothing needs to change.
    """

    level: Level
    text: str
    fix: str = ""


problem = functools.partial(Finding, Level.PROBLEM)
warning = functools.partial(Finding, Level.WARNING)
note = functools.partial(Finding, Level.NOTE)
good = functools.partial(Finding, Level.GOOD)


def make_problem(error: Exception) -> Finding:
    """Creates a finding from an error: advice follows what was received."""
    rule, received, rest = str(error).partition(". Received: ")
    value, _, fix = rest.partition(". ")
    return problem(f"{rule}{received}{value}.", fix)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all checks.

    Attributes:
      name: "process 0 of 2"; outside of a cluster, the machine's name.
      is_chief: Whether this process prints the complete report.
      parts: The sections of the report, one for each subject.
    """

    name: str
    is_chief: bool = True
    parts: tuple[Part, ...]

    @property
    def problems(self) -> list[Finding]:
        """The findings that require a change, most severe first."""
        findings = [f for part in self.parts for f in part.findings]
        return [f for level in PROBLEMS for f in findings if f.level is level]

    @property
    def summary(self) -> str:
        """The number of problems, such as "1 problem, 2 warnings"."""
        levels = collections.Counter(finding.level for finding in self.problems)
        counts = [f"{n} {level}{'s' * (n > 1)}" for level, n in levels.items()]
        return ", ".join(counts) or "nothing to change"

"""What a check finds, and the rules for versions and clocks, which compare several services."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.service.versions import skew

# Deadlines and records hold wall-clock times.
_MAX_OFFSET_S = 1.0


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one target; advice says what to do."""

    target: str
    check: str
    level: Level
    message: str
    advice: str = ""


@dataclass(slots=True)
class Report:
    """The findings so far, and what the comparisons at the end need."""

    findings: list[Finding] = field(default_factory=list)
    # By target: the version it says, and its clock minus ours in seconds.
    versions: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)

    def ok(self, target: str, check: str, message: str) -> None:
        """All is well."""
        self.findings.append(Finding(target, check, Level.OK, message))

    def skipped(self, target: str, check: str, message: str, advice: str = "") -> None:
        """Not checked."""
        self.findings.append(Finding(target, check, Level.SKIPPED, message, advice))

    def warning(self, target: str, check: str, message: str, advice: str) -> None:
        """It works, and will or may not."""
        self.findings.append(Finding(target, check, Level.WARNING, message, advice))

    def problem(self, target: str, check: str, message: str, advice: str) -> None:
        """It does not work."""
        self.findings.append(Finding(target, check, Level.PROBLEM, message, advice))

    @property
    def num_problems(self) -> int:
        """Findings that must be dealt with."""
        return sum(finding.level is Level.PROBLEM for finding in self.findings)

    def compare(self) -> None:
        """Adds what only several services together show."""
        _compare_versions(self, self.versions)
        for target, offset_s in self.clocks.items():
            text = f"{offset_s:+.1f} s from this machine's"
            if abs(offset_s) <= _MAX_OFFSET_S:
                self.ok(target, "clock", text)
            else:
                advice = "set both clocks by NTP: deadlines and records are in wall-clock time"
                self.warning(target, "clock", text, advice)


def _compare_versions(report: Report, versions: Mapping[str, str]) -> None:
    """Each service's version against that of the first one."""
    if not versions:
        return
    first, reference = next(iter(versions.items()))
    for target, version in versions.items():
        if not version:
            advice = "upgrade it: from 0.1.0 on, services say their versions"
            report.warning(target, "version", "says no version", advice)
        elif (steps := skew(reference, version)) == 0:
            report.ok(target, "version", version)
        elif steps is not None and abs(steps) == 1:
            text = f"{version}, and {first} is {reference}"
            report.warning(target, "version", text, "they work together; finish the upgrade")
        else:
            text = f"{version}, and {first} is {reference}: they do not work together"
            report.problem(target, "version", text, "upgrade one minor version after the other")

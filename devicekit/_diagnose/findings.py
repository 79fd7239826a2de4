"""The table of findings: every check, and the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from devicekit._diagnose import drivers, machine, variables
from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding, Severity, sentence

__all__ = ["find"]

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# Of one severity, causes are told before what follows from them.
_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    machine.probes,
    machine.build,
    machine.plugins,
    drivers.container,
    drivers.permission,
    drivers.mismatch,
    drivers.driver,
    drivers.driver_too_old,
    variables.changed,
    variables.double_mask,
    variables.malformed,
    variables.hidden,
    machine.devices,
    machine.mps,
    variables.ranks,
    drivers.counts,
    variables.nvml_check,
    machine.mig,
    variables.order,
)


def find(facts: Facts) -> tuple[Finding, ...]:
    """Return what is to know about this machine, the worst first."""
    found = [finding for check in _CHECKS for finding in _run(check, facts)]
    if all(finding.severity == "note" for finding in found):
        calm = machine.nothing(facts)
        found += [] if calm is None else [calm]
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _run(check: Callable[[Facts], Iterator[Finding]], facts: Facts) -> Iterator[Finding]:
    """Yield what a check finds; a mistake in one costs its findings, and not the diagnosis."""
    try:
        yield from check(facts)
    except Exception as error:
        yield Finding(
            code="probe-failed",
            severity="warning",
            about="",
            cause=sentence(f"A check of devicekit failed: {type(error).__name__}: {error}"),
            remedy="Report it to devicekit with this page.",
        )

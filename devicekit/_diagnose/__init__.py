"""What works on this machine, what does not, why, and what to do.

What gathers, finds and writes is imported when there is a diagnosis to make: few programs make one,
and all of them import this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding

__all__ = ["Diagnosis", "Facts", "Finding", "diagnose"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Diagnosis:
    """What torch can use on this machine, what it cannot, why, and what to do.

    `str()` is a page of at most 100 columns. It has no user names, host names or serial numbers
    and shortens UUIDs, so it can be pasted into a bug report. In a notebook it shows as tables.

    Attributes:
        facts: What was found out about the machine, with values as they are.
        findings: What is to know about it, the worst first. Each has a `code` that does not
            change, a `severity` (`"error"`, `"warning"` or `"note"`), the device type that it is
            `about`, a `cause` and a `remedy`.

    Examples:
        >>> import devicekit, devicekit.testing
        >>> with devicekit.testing.fake_devices(cuda=2, environ={"CUDA_VISIBLE_DEVICES": "0,0"}):
        ...     diagnosis = devicekit.diagnose()
        >>> [finding.code for finding in diagnosis.findings]
        ['duplicate-entry']
    """

    facts: Facts
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        codes = ", ".join(finding.code for finding in self.findings) or "nothing is wrong"
        return f"<Diagnosis: auto() is {self.facts.choice}; {codes}>"

    def _repr_html_(self) -> str:
        from devicekit._diagnose.render import as_html

        return as_html(self.facts, self.findings)

    def usable(self, device_type: str, index: int | None = None, /) -> bool:
        """Return whether a device of this type, or the one with this index, can be used.

        Examples:
            >>> import devicekit
            >>> devicekit.diagnose().usable("cpu")
            True
        """
        return any(
            info.usable
            for info in self.facts.devices
            if info.device.type == device_type
            and (index is None or index == (info.device.index or 0))
        )

    def to_text(self, *, color: bool = False) -> str:
        """Return the page for people.

        Args:
            color: Whether to color the severity, for a terminal.
        """
        from devicekit._diagnose.render import as_text

        return as_text(self.facts, self.findings, color=color)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a log or for JSON, as free of private data as the page.

        The keys, of which later versions may add some; `schema` counts up where one changes:

        - `schema`: 1. `devicekit`, `python`, `system`: texts.
        - `torch`: `version`, `cuda`, `rocm`, `xpu` (texts; None where the build has none), `mps`.
        - `driver`: `version` and the newest `cuda` that NVIDIA's driver supports, or None.
        - `auto`: `device` (None where `auto()` refuses), `reason`, `passed_over` (texts).
        - `findings`: for each `code`, `severity`, `about`, `cause`, `remedy`.
        - `devices`: for each `device`, `name`, `total_memory` and `free_memory` (bytes or None),
          `capability` (two numbers or None), `bfloat16` and `tensor_cores` (None where it is not
          known), `usable`, `reason` (None where usable).
        - `variables`: the environment variables that matter and are set.

        Examples:
            >>> import devicekit
            >>> devicekit.diagnose().to_dict()["devices"][-1]["device"]
            'cpu'
        """
        from devicekit._diagnose.render import as_dict

        return as_dict(self.facts, self.findings)


def diagnose() -> Diagnosis:
    """Return what torch can use on this machine, what it cannot, why, and what to do.

    For when "the GPU is not seen": `print(devicekit.diagnose())`, or `python -m devicekit`.
    It never raises. On Linux it asks drivers in a child process, with a limit of time for each
    question, so it does not hang with a driver that does, and a later `fork` can use CUDA as
    before. Where CUDA runs in this process already, and on other systems, it asks in this process.

    Examples:
        >>> import devicekit, devicekit.testing
        >>> with devicekit.testing.fake_devices(cuda=1, driver="11.4", build="13.0"):
        ...     print(devicekit.diagnose().findings[0].remedy)
        Update the driver, or install a build of torch for CUDA 11.
    """
    from devicekit._diagnose.findings import find
    from devicekit._diagnose.gather import gather

    facts = gather()
    return Diagnosis(facts=facts, findings=find(facts))

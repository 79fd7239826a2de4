"""A diagnosis as a page for people, as HTML and as plain data."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from devicekit._backends import DeviceInfo
from devicekit._backends.survey import Build
from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding, Severity, sentence

__all__ = ["as_dict", "as_html", "as_text", "redacted"]

_WIDTH = 100
_SCHEMA = 1

_COLORS: dict[Severity, str] = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1m"}
_PLAIN = "\x1b[0m"


def as_text(facts: Facts, findings: Sequence[Finding], *, color: bool = False) -> str:
    """Return the page, of at most 100 columns, without a newline at its end."""
    lines = [*_wrapped_pairs(_head(facts)), "", *_findings(findings, color=color)]
    lines += ["", "devices", *_wrapped_pairs(_device_rows(facts), indent=2)]
    variables = [(name, repr(redacted(value))) for name, value in facts.environment]
    lines += ["", "variables"]
    lines += _wrapped_pairs(variables, indent=2) if variables else ["  none that matters is set"]
    return "\n".join(lines)


def _head(facts: Facts) -> Iterator[tuple[str, str]]:
    build = facts.build
    yield "devicekit", f"{facts.version}, Python {build.python}, {build.system}"
    yield "torch", f"{build.torch}, built for {_made_for(build)}"
    if driver := _driver(facts):
        yield "driver", driver
    if facts.choice is None:
        yield "auto()", f"refuses: {redacted(facts.choice_reason)}"
    else:
        yield "auto()", f"{facts.choice}: {redacted(facts.choice_reason)}"
    for passed in facts.passed_over:
        yield "", f"passed over: {redacted(passed)}"


def _made_for(build: Build) -> str:
    there = (
        ("CUDA", build.cuda),
        ("ROCm", build.rocm),
        ("XPU", build.xpu),
        ("MPS", "" if build.mps else None),
    )
    names = [f"{name} {version}".strip() for name, version in there if version is not None]
    return " and ".join(names) or "the CPU only"


def _driver(facts: Facts) -> str:
    driver, survey = facts.survey.driver, facts.survey
    if driver is None:
        if facts.build.rocm and not survey.module:
            return "AMD's, with /dev/kfd" if "kfd" in survey.nodes else "none of AMD (/dev/kfd)"
        if (facts.build.xpu or facts.build.mps) and not survey.module:
            return ""
        known = f"NVIDIA kernel module {survey.module}" if survey.module else "no NVIDIA driver"
        if survey.silent:
            return f"{known}; nvidia-smi does not answer"
        return f"{known}; nvidia-smi: {redacted(survey.trouble)}" if survey.trouble else known
    version = f"NVIDIA {driver.version or ''}".strip()
    newest = f", CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
    return f"{version}{newest}"


def _findings(findings: Sequence[Finding], *, color: bool) -> Iterator[str]:
    if not findings:
        yield "Nothing is wrong."
    for finding in findings:
        word = finding.severity
        shown = f"{_COLORS[word]}{word}{_PLAIN}" if color else word
        yield f"{shown}{' ' * (9 - len(word))}{finding.code}"
        for text in (finding.cause, finding.remedy):
            yield from _fill(_sentence(text), indent=9)


def _sentence(text: str) -> str:
    """Return a sentence as it may stand in a bug report; it still ends in a full stop."""
    return sentence(redacted(text, longest=600))


def _device_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    for info in facts.devices:
        yield str(info.device), ", ".join(_traits(info))


def _traits(info: DeviceInfo) -> Iterator[str]:
    yield redacted(info.name)
    if info.total_memory is not None:
        free = "" if info.free_memory is None else f"{_gib(info.free_memory)} of "
        yield f"{free}{_gib(info.total_memory)} GiB{' free' if free else ''}"
    if info.capability is not None:
        yield f"capability {info.capability[0]}.{info.capability[1]}"
    if info.bfloat16 is not None and info.device.type != "cpu":
        yield "bfloat16" if info.bfloat16 else "no bfloat16"
    if info.tensor_cores is not None and info.device.type != "cpu":
        yield "tensor cores" if info.tensor_cores else "no tensor cores"
    yield "usable" if info.usable else f"not usable: {info.reason}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"


def _wrapped_pairs(
    pairs: Iterator[tuple[str, str]] | list[tuple[str, str]], indent: int = 0
) -> list[str]:
    rows = list(pairs)
    width = max(len(name) for name, _ in rows) + 2
    lines: list[str] = []
    for name, text in rows:
        filled = _fill(text, indent=indent + width)
        lines.append(f"{' ' * indent}{name:<{width}}{filled[0].lstrip()}".rstrip())
        lines += filled[1:]
    return lines


def _fill(text: str, *, indent: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=blank,
        subsequent_indent=blank,
        break_on_hyphens=False,
    ) or [blank]


# ---- HTML ----------------------------------------------------------------------------------------

# No colors of its own but one for the severity, which light and dark pages both show well.
_HTML_COLORS: dict[Severity, str] = {"error": "#d33", "warning": "#c80", "note": "inherit"}
_CELL = 'style="text-align:left;vertical-align:top;padding:0 1em 0 0"'


def as_html(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return compact tables for a notebook, readable on light and dark pages."""
    import html  # for notebooks only; it imports tables of entities

    head = [_row(name, html.escape(text)) for name, text in _head(facts)]
    told = [
        _row(
            f'<b style="color:{_HTML_COLORS[f.severity]}">{f.severity}</b>',
            f"<code>{f.code}</code><br>{html.escape(_sentence(f.cause))}<br>"
            f"<i>{html.escape(_sentence(f.remedy))}</i>",
        )
        for f in findings
    ] or [_row("", "Nothing is wrong.")]
    devices = [_row(name, html.escape(text)) for name, text in _device_rows(facts)]
    variables = [_row(n, html.escape(repr(redacted(v)))) for n, v in facts.environment]
    parts = (head, told, devices, variables)
    return "".join(
        f'<table style="color:inherit">{"".join(rows)}</table>' for rows in parts if rows
    )


def _row(name: str, content: str) -> str:
    return f"<tr><td {_CELL}>{name}</td><td {_CELL}>{content}</td></tr>"


# ---- data ----------------------------------------------------------------------------------------


def as_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return plain data, as `json.dumps` takes it; the schema is documented at `Diagnosis`."""
    build, survey, driver = facts.build, facts.survey, facts.survey.driver
    return {
        "schema": _SCHEMA,
        "devicekit": facts.version,
        "python": build.python,
        "system": build.system,
        "torch": {
            "version": build.torch,
            "cuda": build.cuda,
            "rocm": build.rocm,
            "xpu": build.xpu,
            "mps": build.mps,
        },
        "driver": {
            "version": driver.version if driver else survey.module,
            "cuda": f"{driver.cuda[0]}.{driver.cuda[1]}" if driver and driver.cuda else None,
        },
        "auto": {
            "device": None if facts.choice is None else str(facts.choice),
            "reason": redacted(facts.choice_reason),
            "passed_over": [redacted(passed) for passed in facts.passed_over],
        },
        "findings": [
            {
                "code": f.code,
                "severity": f.severity,
                "about": f.about,
                "cause": _sentence(f.cause),
                "remedy": _sentence(f.remedy),
            }
            for f in findings
        ],
        "devices": [_device(info) for info in facts.devices],
        "variables": {name: redacted(value) for name, value in facts.environment},
    }


def _device(info: DeviceInfo) -> dict[str, Any]:
    return {
        "device": str(info.device),
        "name": redacted(info.name),
        "total_memory": info.total_memory,
        "free_memory": info.free_memory,
        "capability": None if info.capability is None else list(info.capability),
        "bfloat16": info.bfloat16,
        "tensor_cores": info.tensor_cores,
        "usable": info.usable,
        "reason": info.reason,
    }


# ---- what may be told ----------------------------------------------------------------------------

_PREFIXED_UUID = re.compile(r"((?:GPU-|MIG-)+[0-9a-fA-F]{8})(?:-[0-9a-fA-F]+)+")
_BARE_UUID = re.compile(r"\b([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"(?:/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s'\":,;]+")


def redacted(text: str, *, longest: int = 200) -> str:
    r"""Return a text as it may stand in a bug report: short UUIDs, no home folder, one line.

    Examples:
        >>> redacted("GPU-01234567-89ab-cdef-0123-456789abcdef in /home/ann/x")
        'GPU-01234567... in ~/x'
    """
    for pattern in (_PREFIXED_UUID, _BARE_UUID):
        text = pattern.sub(r"\1...", text)
    text = _HOME.sub("~", text)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

"""One thing to know about this machine, with its cause and a remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Finding", "Severity", "sentence", "several"]

Severity: TypeAlias = Literal["error", "warning", "note"]
"""`error`: a device cannot be used. `warning`: not what was meant. `note`: good to know."""


class Finding(NamedTuple):
    """One thing to know about this machine.

    Attributes:
        code: What it is, for programs; codes do not change.
        severity: `"error"`, `"warning"` or `"note"`.
        about: The device type that it is about, or an empty text.
        cause: What is the matter, in one sentence.
        remedy: One thing to do.
    """

    code: str
    severity: Severity
    about: str
    cause: str
    remedy: str


def sentence(text: str) -> str:
    """Return a text with a full stop at its end, unless it ends a sentence already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def several(number: int, what: str) -> str:
    """Return `"1 GPU"` or `"2 GPUs"`."""
    return f"{number} {what}{'' if number == 1 else 's'}"

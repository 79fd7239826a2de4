"""The command line: `python -m devicekit` says what torch can use here, and why not more."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence

from devicekit._backends import current_machine
from devicekit._device.refusal import why_unknown
from devicekit._device.spelling import meant, parse, shown
from devicekit._diagnose import Diagnosis, diagnose
from devicekit._diagnose.render import redacted
from devicekit.errors import InvalidDeviceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagnosis and return the exit status.

    Args:
        arguments: What stands behind the command; by default what it was started with.

    Returns:
        0, or 1 where the device that `--require` names cannot be used.

    Raises:
        SystemExit: The arguments are wrong (status 2), or ask for help or the version (0).

    Examples:
        >>> main(["--require", "cpu", "--json"])  # doctest: +ELLIPSIS
        {
          "schema": 1,
        ...
        0
    """
    options = _parser().parse_args(arguments)
    diagnosis = diagnose()
    missing = None
    if options.require is not None:
        missing = _missing(diagnosis, *options.require)
    if options.json:
        data = diagnosis.to_dict()
        if options.require is not None:
            data["required"] = {
                "device": _written(*options.require),
                "usable": missing is None,
                "missing": missing,
            }
        _print(json.dumps(data, indent=2))
    else:
        _print(diagnosis.to_text(color=_wants_color()))
        if options.require is not None:
            _print(f"\n{missing or _written(*options.require) + ' is usable, as required.'}")
    return 0 if missing is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devicekit",
        description="Say which devices torch can use here, and why not others.",
        epilog="What it prints can be pasted into a bug report: it has no user names, host names "
        "or serial numbers.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--require",
        type=_required,
        metavar="TYPE[:INDEX]",
        help="exit with status 1 where this device cannot be used: cuda, cuda:1, mps, cpu ...",
    )
    version = getattr(sys.modules.get("devicekit"), "__version__", "unknown")
    parser.add_argument("--version", action="version", version=f"devicekit {version}")
    return parser


def _required(text: str) -> tuple[str, int | None]:
    with contextlib.suppress(InvalidDeviceError):
        device_type, index = parse(text)
        if device_type is not None and device_type != "meta":
            return device_type, index
    hint = meant(text)
    msg = (
        f"{shown(text)} is no device that can be missing: expected a type, and an index if it "
        "matters, such as cuda, cuda:1, xpu, mps or cpu."
    )
    if hint not in (None, "auto", "meta"):
        msg += f" Did you mean {hint!r}?"
    raise argparse.ArgumentTypeError(msg)


def _written(device_type: str, index: int | None) -> str:
    return device_type if index is None else f"{device_type}:{index}"


def _missing(diagnosis: Diagnosis, device_type: str, index: int | None) -> str | None:
    """Return what is missing and why, or None where the device can be used."""
    if diagnosis.usable(device_type, index):
        return None
    wanted = _written(device_type, index)
    return f"{wanted} is required, and cannot be used here. {_why(diagnosis, device_type, index)}"


def _why(diagnosis: Diagnosis, device_type: str, index: int | None) -> str:
    """Return why a device cannot be used, in one sentence."""
    facts = diagnosis.facts
    there = [info for info in facts.devices if info.device.type == device_type]
    if index is not None and any(info.usable for info in there) and index >= len(there):
        number = f"{len(there)} {device_type} device{'' if len(there) == 1 else 's'}"
        return f"This process sees {number}, numbered from 0."
    for name, error in facts.failed:
        if name in (device_type, "the types of accelerators"):
            return f"The question for it ended in an error: {redacted(error).rstrip('.')}."
    for finding in diagnosis.to_dict()["findings"]:
        concerns = finding["about"] == device_type and finding["code"] != "count-disagrees"
        if concerns or (finding["about"] == "" and finding["severity"] == "error"):
            return str(finding["cause"])
    if facts.accelerator(device_type) is None:
        cause = why_unknown(device_type, facts.build.torch)
        return f"{cause[0].upper()}{cause[1:]}."
    return f"No usable {device_type} device is found here."


def _wants_color() -> bool:
    environ = current_machine().environ
    return bool(
        sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    )


def _print(text: str) -> None:
    """Print, with a mark in place of what the terminal has no character for."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _run() -> int:
    if sys.stdout is None:  # it was closed: nobody reads
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # the reader, such as `head`, has read enough; or the disk is full
        with contextlib.suppress(OSError):
            sys.stdout.close()
        if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
            sys.stderr.write(f"devicekit: could not write the page: {error}\n")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(_run())

"""Findings about the build of torch, single devices, and what could not be asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from devicekit._backends import PLUGINS, DeviceInfo
from devicekit._backends.accelerator import Accelerator
from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding, Severity, sentence
from devicekit._diagnose.vendors import PLATFORMS, hardware

__all__ = ["build", "devices", "mig", "mps", "nothing", "plugins", "probes"]

# ---- the build -----------------------------------------------------------------------------------


def build(facts: Facts) -> Iterator[Finding]:
    """Hardware that this build of torch is not made for."""
    made_for = [
        name
        for name, there in (
            ("CUDA", facts.build.cuda),
            ("ROCm", facts.build.rocm),
            ("XPU", facts.build.xpu),
            ("MPS", facts.build.mps),
        )
        if there
    ]
    found = hardware(facts)
    served = any(PLATFORMS[vendor].build in made_for for vendor in found)
    for vendor, seen in found.items():
        platform = PLATFORMS[vendor]
        if platform.plugin:
            if facts.accelerator(platform.device_type) or platform.device_type in (
                facts.survey.plugins
            ):
                continue
            yield Finding(
                code="plugin-not-installed",
                severity="error",
                about=platform.device_type,
                cause=f"The machine has {seen}, and its plugin for torch is not installed.",
                remedy=f"Install the plugin and import {platform.plugin}.",
            )
        elif platform.build not in made_for:
            yield _wrong_build(facts, vendor, seen, made_for, served=served)


def _wrong_build(
    facts: Facts, vendor: str, seen: str, made_for: list[str], *, served: bool
) -> Finding:
    platform = PLATFORMS[vendor]
    # Most processors of Intel and AMD have a GPU that nobody computes on.
    likely = vendor == "nvidia" or (vendor == "amd" and "kfd" in facts.survey.nodes)
    severity: Severity = "error" if likely and not served else "note"
    what = f"for {' and '.join(made_for)}" if made_for else "for the CPU only"
    newest = facts.survey.driver.cuda if facts.survey.driver else None
    wanted = f"a build of torch with {platform.build}"
    if vendor == "nvidia" and newest:
        wanted += f" {newest[0]} (the driver supports CUDA up to {newest[0]}.{newest[1]})"
    return Finding(
        code="other-build" if made_for else "cpu-only-build",
        severity=severity,
        about=platform.device_type,
        cause=f"This build of torch ({facts.build.torch}) is {what}, and the machine has {seen}.",
        remedy=f"Install {wanted}."
        if severity == "error"
        else f"To use it, install {wanted}; otherwise there is nothing to do.",
    )


# ---- devices -------------------------------------------------------------------------------------


def devices(facts: Facts) -> Iterator[Finding]:
    """Devices that torch counts and cannot compute on."""
    for accelerator in facts.accelerators:
        for info in accelerator.devices:
            if info.reason == "busy":
                yield Finding(
                    code="device-busy",
                    severity="warning",
                    about=info.device.type,
                    cause=f"{info.device} ({info.name}) is in a compute mode that keeps this "
                    "process out: exclusive with another process on it, or prohibited.",
                    remedy="End the other process, or have an administrator run "
                    "'nvidia-smi --compute-mode=DEFAULT'.",
                )
            if info.reason == "architecture not in this build":
                yield _unsupported(info, accelerator)


def _unsupported(info: DeviceInfo, accelerator: Accelerator) -> Finding:
    numbers = [
        divmod(int(match[1]), 10)
        for match in map(re.compile(r"sm_([0-9]+)").match, accelerator.architectures)
        if match
    ]
    capability = info.capability or (0, 0)
    has = f"compute capability {capability[0]}.{capability[1]}"
    if accelerator.label == "ROCm":
        has = "an architecture"
    side = "other than"
    remedy = "Install a build of torch that has kernels for it."
    if numbers and capability < min(numbers):
        side = "older than"
        remedy = "Install an older build of torch, or one for an older CUDA."
    elif numbers and capability > max(numbers):
        side = "newer than"
        remedy = "Install a newer build of torch, or one for a newer CUDA."
    return Finding(
        code="architecture-not-built",
        severity="error",
        about=info.device.type,
        cause=f"{info.device} ({info.name}) has {has}, {side} what this build of torch has kernels "
        f"for ({' '.join(accelerator.architectures)}).",
        remedy=remedy,
    )


def mig(facts: Facts) -> Iterator[Finding]:
    """GPUs that are cut into slices."""
    known = facts.survey.driver.gpus if facts.survey.driver else ()
    cut = [gpu.name for gpu in known if gpu.mig]
    value = facts.environ.get("CUDA_VISIBLE_DEVICES", "")
    entries = [entry for entry in value.split(",") if entry.strip().startswith("MIG-")]
    if len(entries) > 1:
        yield Finding(
            code="mig",
            severity="warning",
            about="cuda",
            cause=f"CUDA_VISIBLE_DEVICES names {len(entries)} MIG slices, and CUDA shows a process "
            "one: the first.",
            remedy="Start one process for each slice, with its UUID in CUDA_VISIBLE_DEVICES.",
        )
    elif cut or entries:
        what = f"{', '.join(dict.fromkeys(cut))} is cut" if cut else "A GPU is cut"
        yield Finding(
            code="mig",
            severity="note",
            about="cuda",
            cause=f"{what} into MIG slices, of which CUDA shows a process one.",
            remedy="To choose a slice, put its UUID ('nvidia-smi -L') into CUDA_VISIBLE_DEVICES.",
        )


def mps(facts: Facts) -> Iterator[Finding]:
    """An Apple build on a Mac whose GPU torch cannot use."""
    found = facts.accelerator("mps")
    if facts.build.mps and not (found and found.devices):
        yield Finding(
            code="mps-not-usable",
            severity="warning",
            about="mps",
            cause="This build of torch has MPS, and this Mac has no GPU that it can use: it needs "
            "Apple silicon, or an AMD GPU, with a recent macOS, and no virtual machine.",
            remedy="Update macOS, or use the CPU.",
        )


def plugins(facts: Facts) -> Iterator[Finding]:
    """Plugins that are installed and not imported."""
    for device_type in facts.survey.plugins:
        yield Finding(
            code="plugin-not-imported",
            severity="warning",
            about=device_type,
            cause=f"The plugin {PLUGINS[device_type]} is installed and not imported, so torch does "
            f"not know {device_type!r}.",
            remedy=f"Write 'import {PLUGINS[device_type]}' before the device is used.",
        )


# ---- what could not be asked ---------------------------------------------------------------------


def probes(facts: Facts) -> Iterator[Finding]:
    """Questions that were not answered."""
    if facts.blocked:
        yield Finding(
            code="driver-blocked",
            severity="error",
            about="",
            cause=f"The question for {facts.blocked!r} was not answered in time: a driver hangs.",
            remedy="Restart the machine; look for 'NVRM' or 'amdgpu' in its kernel log.",
        )
    if facts.crashed:
        yield Finding(
            code="probe-crashed",
            severity="error",
            about="",
            cause=f"The process that asked for {facts.crashed!r} crashed in the driver or a "
            "plugin.",
            remedy="Reinstall the driver and torch so that they fit each other.",
        )
    for name, error in facts.failed:
        yield Finding(
            code="probe-failed",
            severity="warning",
            about=name if facts.accelerator(name) else "",
            cause=sentence(f"The question for {name!r} ended in an error: {error}"),
            remedy="Report it to devicekit, or to the plugin that it names, with this page.",
        )


def nothing(facts: Facts) -> Finding | None:
    """Return the calm note for a machine without a usable accelerator, or None."""
    if any(info.usable for info in facts.devices[:-1]):
        return None
    cuda = facts.accelerator("cuda")
    if cuda and cuda.reason in ("no driver", "none visible") and cuda.label == "CUDA":
        return Finding(
            code="no-accelerator",
            severity="note",
            about="cuda",
            cause=f"This build of torch is for {cuda.runtime}, and no NVIDIA GPU and no driver for "
            "one are found here.",
            remedy="Nothing to do on a machine without one: torch computes on the CPU.",
        )
    return Finding(
        code="no-accelerator",
        severity="note",
        about="",
        cause="No GPU or other accelerator that torch could use is found here.",
        remedy="Nothing to do: torch computes on the CPU.",
    )

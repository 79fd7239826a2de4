"""Findings about drivers: none, too old, torn, closed, or out of reach of a container."""

from __future__ import annotations

import re
from collections.abc import Iterator

from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding, sentence
from devicekit._diagnose.vendors import hardware

__all__ = ["container", "counts", "driver", "driver_too_old", "mismatch", "permission"]


def _said(facts: Facts) -> str:
    """Return what CUDA said when it did not start, or nothing."""
    cuda = facts.accelerator("cuda")
    said = facts.refused_to_start
    if said is None and cuda and cuda.reason == "driver failed":
        said = cuda.detail
    if said is None:
        return ""
    said = said.replace("CUDA initialization: ", "")
    said = said.replace(" Setting the available devices to be zero.", "")
    return said or "it gives no reason"


def _is_mismatch(facts: Facts) -> bool:
    if re.search(r"version mismatch|\b803\b", f"{_said(facts)} {facts.survey.trouble}"):
        return True
    module, libraries = facts.survey.module, facts.survey.libraries
    differ = module not in (None, "?") and libraries and not {module, "?"} & set(libraries)
    return bool(differ and _said(facts))


def mismatch(facts: Facts) -> Iterator[Finding]:
    """A driver that was updated while its kernel module was loaded."""
    if not _is_mismatch(facts):
        return
    survey = facts.survey
    versions = (
        f" (kernel module {survey.module}, library {', '.join(survey.libraries)})"
        if survey.module and survey.libraries
        else ""
    )
    yield Finding(
        code="driver-mismatch",
        severity="error",
        about="cuda",
        cause="NVIDIA's kernel module and its libraries are of different versions"
        f"{versions}, as after an update of the driver.",
        remedy="Restart the machine; in a container, start it anew after the update of the host.",
    )


def driver(facts: Facts) -> Iterator[Finding]:
    """No driver, or one that does not start."""
    cuda = facts.accelerator("cuda")
    if cuda is None or _in_container_without_gpu(facts) or facts.blocked:
        return
    if facts.survey.bad_fork:
        yield Finding(
            code="forked-after-start",
            severity="error",
            about="cuda",
            cause="This process was forked from one that had started CUDA, and cannot use it.",
            remedy="Start worker processes with the method 'spawn', or before CUDA is used.",
        )
    elif cuda.label == "ROCm" and not cuda.devices and "kfd" not in facts.survey.nodes:
        yield from _no_amd_driver(facts)
    elif cuda.reason == "no driver":
        yield from _no_nvidia_driver(facts)
    elif cuda.reason == "none visible":
        yield from _no_device(facts, cuda.label)
    if _said(facts) and not _is_mismatch(facts) and not facts.survey.bad_fork:
        nvidia = cuda.label == "CUDA"
        yield Finding(
            code="driver-failed",
            severity="error",
            about="cuda",
            cause=sentence(f"{cuda.label} does not start: {_said(facts)}"),
            remedy="Set variables before the program starts and run it again; if it fails still, "
            "reload the kernel module nvidia_uvm or restart the machine."
            if nvidia
            else "Restart the machine, and run 'rocminfo' for what the driver sees.",
        )


def _no_nvidia_driver(facts: Facts) -> Iterator[Finding]:
    seen = hardware(facts).get("nvidia")
    if seen is None:
        return
    loaded = facts.survey.module is not None
    yield Finding(
        code="no-driver",
        severity="error",
        about="cuda",
        cause=f"The machine has {seen}, and "
        + ("torch finds no library libcuda." if loaded else "no NVIDIA driver is loaded."),
        remedy="Install the driver's libraries (libcuda.so.1) on the search path of libraries."
        if loaded
        else "Install NVIDIA's driver, or load its kernel module with 'modprobe nvidia'.",
    )


def _no_amd_driver(facts: Facts) -> Iterator[Finding]:
    seen = hardware(facts).get("amd")
    if seen is None or "dxg" in facts.survey.nodes:  # under WSL the driver has another file
        return
    yield Finding(
        code="no-driver",
        severity="error",
        about="cuda",
        cause=f"The machine has {seen}, and /dev/kfd is not there.",
        remedy="Install AMD's driver amdgpu; start a container with --device=/dev/kfd "
        "--device=/dev/dri.",
    )


def _no_device(facts: Facts, label: str) -> Iterator[Finding]:
    seen = hardware(facts).get("nvidia" if label == "CUDA" else "amd")
    if seen is None and facts.counted:
        seen = f"{facts.counted} that the management library counts"
    if seen is None:
        return
    yield Finding(
        code="driver-failed",
        severity="error",
        about="cuda",
        cause=f"The driver gives {label} no device, and the machine has {seen}.",
        remedy="Restart the machine; look for 'NVRM' or 'amdgpu' in its kernel log.",
    )


def driver_too_old(facts: Facts) -> Iterator[Finding]:
    """A driver that is older than this build of torch needs."""
    cuda = facts.accelerator("cuda")
    if cuda is None or cuda.reason != "driver too old":
        return
    found = re.search(r"found version ([0-9]+)", cuda.detail)
    newest = facts.survey.driver.cuda if facts.survey.driver else None
    if newest is None and found:
        newest = (int(found[1]) // 1000, int(found[1]) % 1000 // 10)
    version = facts.survey.driver.version if facts.survey.driver else facts.survey.module
    supports = f"supports CUDA up to {newest[0]}.{newest[1]}" if newest else "is too old"
    yield Finding(
        code="driver-too-old",
        severity="error",
        about="cuda",
        cause=f"The NVIDIA driver{f' {version}' if version else ''} {supports}, "
        f"and this build of torch is for {cuda.runtime}.",
        remedy="Update the driver"
        + (f", or install a build of torch for CUDA {newest[0]}." if newest else "."),
    )


def counts(facts: Facts) -> Iterator[Finding]:
    """Torch counts devices that cannot be used."""
    cuda = facts.accelerator("cuda")
    usable = sum(info.reason != "driver failed" for info in cuda.devices) if cuda else 0
    if cuda and facts.counted and not usable and not facts.blocked:
        yield Finding(
            code="count-disagrees",
            severity="warning",
            about="cuda",
            cause=f"torch.cuda.device_count() is {facts.counted}, which the management library "
            f"says, and {cuda.label} does not start.",
            remedy="Go by devicekit.auto() or torch.cuda.is_available(), not by the count.",
        )


def _in_container_without_gpu(facts: Facts) -> bool:
    """Whether the host has a GPU that the container was not given."""
    survey = facts.survey
    if not survey.container:
        return False
    nvidia = "nvidia" in hardware(facts) and not (survey.driver and survey.driver.gpus)
    return nvidia and ("nvidia" not in survey.nodes or not survey.libraries)


def container(facts: Facts) -> Iterator[Finding]:
    """A container on a machine with a GPU that was not given to it."""
    if _in_container_without_gpu(facts):
        yield Finding(
            code="container-without-gpu",
            severity="error",
            about="cuda",
            cause="This container was started without NVIDIA's container runtime: the machine has "
            f"{hardware(facts)['nvidia']}, and the container has no "
            + ("device file /dev/nvidia0." if facts.survey.libraries else "library libcuda."),
            remedy="Start it with 'docker run --gpus all', or with the NVIDIA device plugin in "
            "Kubernetes.",
        )


def permission(facts: Facts) -> Iterator[Finding]:
    """Device files that this process may not open."""
    for group, device_type, path in (
        ("nvidia", "cuda", "/dev/nvidia0"),
        ("kfd", "cuda", "/dev/kfd"),
        ("dri", "xpu", "/dev/dri/renderD128"),
    ):
        accelerator = facts.accelerator(device_type)
        wanted = accelerator is not None and not any(i.usable for i in accelerator.devices)
        if wanted and group in facts.survey.closed:
            yield Finding(
                code="no-permission",
                severity="error",
                about=device_type,
                cause=f"This process may not open {path}, through which the GPU is used.",
                remedy="Add the user to the groups 'render' and 'video', and log in again.",
            )

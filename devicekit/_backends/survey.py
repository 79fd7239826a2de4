"""What surrounds torch: its build, the hardware that the system sees, drivers, the container.

Nothing here starts CUDA or another runtime. It reads `/proc`, `/sys` and `/dev`, and asks NVIDIA's
management library, so that hardware is found which torch cannot use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from devicekit._backends.driver import Driver, read_driver
from devicekit._backends.isolation import in_bad_fork
from devicekit._backends.names import PLUGINS

__all__ = ["Build", "Survey", "read_build", "read_survey"]

_ROOT = Path("/")

# Seconds after which a management library that has said nothing counts as one that blocks.
_PATIENCE = 15.0

_VENDORS = {
    "0x10de": "nvidia",
    "0x1002": "amd",
    "0x8086": "intel",
    "0x1da3": "habana",
    "0x19e5": "huawei",
}
# VGA, 3D and other displays; processing accelerators.
_PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")

_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
)


class Build(NamedTuple):
    """This build of torch.

    Attributes:
        torch: The version of torch.
        cuda: The CUDA version it was built for, or None.
        rocm: The ROCm version it was built for, or None.
        xpu: The version of the SYCL compiler it was built with, or None.
        mps: Whether it was built for Apple's GPUs.
        python: The version of Python.
        system: The operating system and the processor: `"Linux x86_64"`.
    """

    torch: str
    cuda: str | None = None
    rocm: str | None = None
    xpu: str | None = None
    mps: bool = False
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}"


class Survey(NamedTuple):
    """What the system shows of hardware and drivers, whatever torch can do with it.

    Attributes:
        pci: How many GPUs and accelerators the PCI bus shows, by vendor: `("nvidia", 2)`.
        nodes: The groups of device files that are there: `"nvidia"`, `"nvidia-uvm"`, `"kfd"`,
            `"dri"`, `"dxg"`, `"habana"`, `"davinci"`.
        closed: Those of them that this process may not open.
        module: The version of NVIDIA's kernel module, or None where it is not loaded.
        libraries: The versions of NVIDIA's library `libcuda` that are installed; `"?"` for one
            that does not say.
        driver: What NVIDIA's management library says, or None.
        trouble: What `nvidia-smi` said when it failed, or nothing.
        silent: The management library did not answer in time.
        container: Whether this process runs in a container.
        plugins: Device types whose plugin is installed and not imported.
        bad_fork: Whether this process was forked from one that had started CUDA.
        started: The UUIDs of the devices that CUDA shows, once it runs in this process, else None.
    """

    pci: tuple[tuple[str, int], ...] = ()
    nodes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    module: str | None = None
    libraries: tuple[str, ...] = ()
    driver: Driver | None = None
    trouble: str = ""
    silent: bool = False
    container: bool = False
    plugins: tuple[str, ...] = ()
    bad_fork: bool = False
    started: tuple[str, ...] | None = None


def read_build() -> Build:
    """Return what this build of torch was made for; starts nothing."""
    return Build(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        xpu=getattr(torch.version, "xpu", None),
        mps=torch.backends.mps.is_built(),
    )


def read_survey(environ: Mapping[str, str]) -> Survey:
    """Return what the system shows; starts nothing, and takes as long as `nvidia-smi` may."""
    nodes, closed = _nodes()
    module = _module()
    start = time.monotonic()
    driver = read_driver()
    silent = driver is None and time.monotonic() - start >= _PATIENCE
    return Survey(
        pci=_pci(),
        nodes=nodes,
        closed=closed,
        module=module,
        libraries=tuple(sorted(set(_libraries(environ)))),
        driver=driver,
        trouble="" if driver or silent else _trouble(),
        silent=silent,
        container=_in_container(environ),
        plugins=tuple(t for t, package in PLUGINS.items() if _installed_only(package)),
        bad_fork=in_bad_fork(),
        started=_started(),
    )


def _started() -> tuple[str, ...] | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return tuple(map(_uuid, range(torch.cuda.device_count())))


def _uuid(index: int) -> str:
    properties = cast("Any", torch.cuda.get_device_properties(index))
    return str(getattr(properties, "uuid", ""))


def _pci() -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for folder in _entries("sys/bus/pci/devices"):
        vendor = _VENDORS.get(_read(folder / "vendor").strip())
        if vendor and _read(folder / "class").startswith(_PCI_CLASSES):
            found[vendor] = found.get(vendor, 0) + 1
    return tuple(sorted(found.items()))


def _nodes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the groups of device files, and those of which no file can be opened."""
    open_to_us: dict[str, bool] = {}
    for path in (*_entries("dev"), *_entries("dev/dri")):
        group = _group(path.name)
        if group:
            allowed = os.access(path, os.R_OK | os.W_OK)
            open_to_us[group] = open_to_us.get(group, False) or allowed
    return tuple(sorted(open_to_us)), tuple(sorted(g for g, ok in open_to_us.items() if not ok))


def _group(name: str) -> str | None:
    if re.fullmatch(r"nvidia[0-9]+|nvhost-gpu", name):
        return "nvidia"
    if re.fullmatch(r"renderD[0-9]+", name):
        return "dri"
    if name in ("kfd", "dxg", "nvidia-uvm"):
        return name
    match = re.fullmatch(r"(hl|davinci)[0-9]+", name)
    return {"hl": "habana", "davinci": "davinci"}[match[1]] if match else None


def _module() -> str | None:
    """Return the version of NVIDIA's kernel module, which containers see too."""
    text = _read(_ROOT / "proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?\s([0-9]+\.[0-9.]+)\s", text)
    return match[1] if match else "?" if text else None


def _libraries(environ: Mapping[str, str]) -> Iterator[str]:
    extra = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for folder in (*map(_ROOT.joinpath, _LIBRARY_FOLDERS), *map(Path, filter(None, extra))):
        names = _names(folder, "libcuda.so.")
        versions = [name.removeprefix("libcuda.so.") for name in names]
        full = [version for version in versions if "." in version]
        yield from full or ["?" for _ in versions[:1]]


def _names(folder: Path, beginning: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.startswith(beginning))
    except (OSError, ValueError):  # a variable may hold a path that cannot be one
        return []


def _trouble() -> str:
    """Return what nvidia-smi says when it fails; the module `pynvml` has no words for it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join((done.stdout + done.stderr).split())[:300] if done.returncode else ""


def _in_container(environ: Mapping[str, str]) -> bool:
    if any((_ROOT / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    return "KUBERNETES_SERVICE_HOST" in environ or "container" in environ


def _installed_only(package: str) -> bool:
    """Whether a package could be imported, and has not been; importing it would start it."""
    name = package.partition(".")[0]
    if name in sys.modules:
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _entries(folder: str) -> list[Path]:
    try:
        return sorted((_ROOT / folder).iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

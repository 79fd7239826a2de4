"""Compile driver.cpp once for each flavour and each torch, and keep the result.

Nothing here imports torch: the fake CUDA has to be loaded into the process before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["build", "unsupported"]

SOURCE = Path(__file__).with_name("driver.cpp")
# The first torch with all that driver.cpp builds on (DeviceAllocator::getMemoryInfo).
OLDEST_TORCH = (2, 10)


def build(flavour: str) -> Path:
    """Return the shared library of a flavour ("cuda", "mps", "plugin", "xpu"); compile it if new.

    Raises:
        RuntimeError: The compiler failed; the message has what it printed.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{flavour}-{fingerprint(flavour)}.so"
    with locked(library.with_suffix(".lock")):
        if not library.exists():
            compile_to(library, flavour)
    return library


def unsupported(flavour: str) -> str | None:
    """Say why a flavour cannot exist beside the torch of this environment, if so."""
    version = torch_version()
    if not sys.platform.startswith("linux"):
        return f"the fake accelerators are for Linux, not {sys.platform}"
    if release(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"the fake accelerators need torch {oldest} or newer, not {version}"
    if flavour != "plugin" and (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return f"this torch is built for real GPUs, a fake {flavour} has no place in it"
    return None


def cache_folder() -> Path:
    """Return where libraries are kept: never in the checkout, which may be read-only."""
    if chosen := os.environ.get("DEVICEKIT_TEST_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "devicekit-tests"


def fingerprint(flavour: str) -> str:
    """Return a text that changes with whatever the library depends on."""
    digest = hashlib.sha256()
    for file in (SOURCE, *sorted(SOURCE.with_name("native").glob("*.h"))):
        digest.update(file.read_bytes())
    # The folder of torch is linked into the library, and the command holds it.
    digest.update(repr((command(flavour, Path("out")), torch_version())).encode())
    return digest.hexdigest()[:16]


def compile_to(library: Path, flavour: str) -> None:
    """Compile, and let the library appear whole or not at all."""
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        result = subprocess.run(
            command(flavour, unfinished), capture_output=True, text=True, check=False
        )
        if result.returncode:
            msg = f"could not compile the fake {flavour}:\n{result.stderr}"
            raise RuntimeError(msg)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def command(flavour: str, output: Path) -> list[str]:
    """Return the compiler's command line."""
    torch = torch_folder()
    define = [] if flavour == "plugin" else [f"-DFAKE_{flavour.upper()}"]
    # The headers want C++20 since torch 2.12.
    standard = "c++20" if release(torch_version()) >= (2, 12) else "c++17"
    return [
        os.environ.get("CXX", "g++"),
        # Without optimisation: compiling costs more time than running.
        *["-O0", "-g0", f"-std={standard}", "-shared", "-fPIC", "-w", *define],
        *["-isystem", f"{torch}/include", "-isystem", f"{torch}/include/torch/csrc/api/include"],
        str(SOURCE),
        *[f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"],
        *["-o", str(output)],
    ]


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        msg = "torch is not installed"
        raise RuntimeError(msg)
    return Path(spec.origin).parent


def torch_version() -> str:
    """Return the version of the installed torch, such as `2.13.0+cpu`."""
    return importlib.metadata.version("torch")


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes: the second one waits and finds the work done."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go of when the file is closed
        yield

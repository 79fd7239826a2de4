"""The contract tests, once on every fake machine: each in a process of its own.

A fake accelerator has to be in place before torch is imported, so it cannot be made here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

import machines
import pytest
import torch
from fake_accelerator.build import build, unsupported

CONTRACT = Path(__file__).with_name("contract")
TIMEOUT = 1200  # seconds; compiling the fake takes most of them on a busy machine


@pytest.mark.machine("cpu")
@pytest.mark.parametrize("machine", machines.FAKES)
def test_contract_holds_on(machine: str, tmp_path: Path) -> None:
    if reason := unsupported(machine):
        pytest.skip(reason)
    report = tmp_path / "report.xml"

    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(CONTRACT), f"--junit-xml={report}"),
            *("-p", "no:cacheprovider", "-o", "junit_family=xunit2"),
        ],
        cwd=tmp_path,  # `-m` looks for modules here first: not in the checkout
        env={**os.environ, "DEVICEKIT_TEST_MACHINE": machine, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )

    if child.returncode:
        pytest.fail(f"on the machine {machine!r}:\n{child.stdout}", pytrace=False)
    assert passed(report) > 0, child.stdout


@pytest.mark.machine("cpu")
def test_asking_for_the_accelerator_skips_what_needs_one_where_there_is_none() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    environ = {k: v for k, v in os.environ.items() if k != "DEVICEKIT_TEST_MACHINE"}

    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "accelerator", str(CONTRACT / "test_loops.py")],
        cwd=CONTRACT.parents[1],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )

    assert child.returncode == 0, child.stdout
    assert "machine: cpu (no accelerator)" in child.stdout
    assert re.search(r"^=+ 11 skipped", child.stdout, re.MULTILINE), child.stdout


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of the compiler, with a cache of its own; the test writes it."""
    script = tmp_path / "compiler"
    script.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("DEVICEKIT_TEST_CACHE", str(tmp_path / "cache"))
    return script


def test_a_failed_compilation_says_why(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text("#!/bin/sh\necho 'driver.cpp: no such luck' >&2\nexit 1\n")

    with pytest.raises(RuntimeError, match=r"could not compile the fake cuda:\n.*no such luck"):
        build("cuda")

    assert not list((tmp_path / "cache").glob("*.so"))


def test_two_builds_at_once_compile_once(compiler: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # The file to write is the last argument.
    compiler.write_text(f'#!/bin/sh\necho ran >>{log}\nsleep 0.2\nfor out; do :; done\n: >"$out"\n')

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, ["cuda", "cuda"])

    assert first == second
    assert first.exists()
    assert log.read_text() == "ran\n"


def import_path() -> str:
    """Return a search path on which the child finds the devicekit that is tested here."""
    path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    spec = importlib.util.find_spec("devicekit")
    if spec is not None and spec.origin is not None:
        path.insert(0, str(Path(spec.origin).parents[1]))
    return os.pathsep.join(path)


def passed(report: Path) -> int:
    """Return how many tests a JUnit report says passed."""
    suites = ET.parse(report).iter("testsuite")
    return sum(
        int(suite.get("tests", 0))
        - sum(int(suite.get(k, 0)) for k in ("skipped", "failures", "errors"))
        for suite in suites
    )

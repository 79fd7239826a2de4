"""The benchmarks for an accelerator run to their end; their figures mean nothing on a fake one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.machine("cuda", "real")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_accelerator.py"


def test_the_tables_are_printed(
    dev: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_accelerator", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    own = {name: way for name, way in module.WAYS.items() if way[1] is None}
    monkeypatch.setattr(module, "WAYS", own)
    module.main([f"--device={dev}", "--steps=3", "--size=2", "--pixels=8", "--rounds=1"])

    page = capsys.readouterr().out
    for name in ("resident", *own, "coalesced"):
        assert re.search(rf"^  {name} +[0-9.]+ ms", page, re.MULTILINE), page

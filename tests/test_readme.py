"""The README keeps its promises: its code runs, its names exist, its commands are to be found."""

from __future__ import annotations

import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest

import devicekit
import devicekit.testing

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
LANGUAGES = ("python", "bash")
COMMANDS = ("example", "tests")


def test_python_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DEVICEKIT_DEVICE", "LOCAL_RANK", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    names: dict[str, Any] = {"__name__": "README"}

    for line, code in blocks("python"):
        if ">>> " in code:
            assert_shows_what_it_prints(code, names, line)
        else:
            exec(compile("\n" * line + code, str(README), "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test_"):
            value()

    assert "moved" in names


def assert_shows_what_it_prints(code: str, names: dict[str, Any], line: int) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(code, names, "README", str(README), line)
    test.globs = names  # the blocks go on from one another
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=report.write, clear_globs=False)

    assert result.failed == 0, report.getvalue()
    assert result.attempted > 0


def test_code_comes_within_the_first_screen() -> None:
    assert TEXT.partition("```python")[0].count("\n") < 10


def test_every_block_says_its_language() -> None:
    fences = re.findall(r"^```(.*)$", TEXT, re.MULTILINE)

    assert set(fences[::2]) <= set(LANGUAGES)
    assert set(fences[1::2]) == {""}


def test_names_of_devicekit_exist() -> None:
    prose = re.sub(r"devicekit\.errors\.", "devicekit.", TEXT)
    named = set(re.findall(r"\bdevicekit\.(\w+)", prose))

    assert named <= {*devicekit.__all__, "testing", "__all__"}
    called = set(re.findall(r"`(\w+)\(", TEXT)) - {"DataLoader"}
    assert called <= {*devicekit.__all__, *devicekit.testing.__all__}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_found_by_their_mark(command: str) -> None:
    found = re.findall(rf"<!-- command: {command} -->\n```bash\n(.*?)```", TEXT, re.DOTALL)

    assert len(found) == 1
    assert found[0].startswith("python3 -m venv .venv && ")
    assert found[0].count("\n") == 1


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).is_file(), target


def test_every_example_is_listed() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        assert f"(examples/{file.name})" in TEXT


def test_prose_has_one_sentence_to_a_line() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "<"))]

    assert [line for line in lines if re.search(r"[a-z`)]\. [A-Z`]", line)] == []


def blocks(language: str) -> list[tuple[int, str]]:
    """Return the code of every block of a language, with the line it starts on."""
    return [
        (TEXT.count("\n", 0, match.start(1)), match.group(1))
        for match in re.finditer(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    ]

"""The examples, run as their reader runs them: each in a process of its own."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from child import run_python

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
WITH_A_DEVICE_FLAG = [file for file in FILES if "--device" in file.read_text(encoding="utf-8")]


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python(EXAMPLES / name, *arguments, cwd=cwd, DEVICEKIT_DEVICE="cpu")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples_say_what_they_show_and_how_to_run_them(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""

    assert re.match(r"[0-9]{2}_[a-z_]+\.py", file.name)
    assert "\nShows " in docstring
    assert f"python examples/{file.name}" in docstring


@pytest.mark.parametrize("file", WITH_A_DEVICE_FLAG, ids=lambda file: file.stem)
def test_examples_refuse_a_bad_device_without_a_traceback(file: Path, tmp_path: Path) -> None:
    done = run(file.name, "--device", "cuda0", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.endswith("error: 'cuda0' is not a device. Did you mean 'cuda:0'?\n")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_choosing_a_device_shows_what_is_here_and_why_it_was_chosen(tmp_path: Path) -> None:
    done = run("01_choose_a_device.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr == "auto() chose cpu: DEVICEKIT_DEVICE=cpu\n"
    assert re.search(r"^cpu .* usable$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("computing on cpu: the sum of 0 to 5 is 15\n")


def test_choosing_a_device_takes_the_one_that_is_named(tmp_path: Path) -> None:
    done = run("01_choose_a_device.py", "--device", "cpu:0", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "computing on cpu:" in done.stdout


def test_training_on_digits_reaches_97_percent(tmp_path: Path) -> None:
    done = run("02_train_digits.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "training on cpu\n" in done.stdout
    assert re.search(
        r"^epoch  1 of .* loss [0-9.]+, training accuracy 0\.", done.stdout, re.MULTILINE
    )
    last = re.fullmatch(r"test accuracy: ([01]\.[0-9]{3})", done.stdout.splitlines()[-1])
    assert last is not None, done.stdout
    assert float(last.group(1)) >= 0.97


def test_training_refuses_a_device_that_is_not_here(tmp_path: Path) -> None:
    done = run("02_train_digits.py", "--device", "cude", cwd=tmp_path)

    assert done.returncode == 2
    assert "Did you mean 'cuda'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_is_loaded_and_trained_on(tmp_path: Path) -> None:
    done = run("03_checkpoint_anywhere.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    before, after = (float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout))
    assert after < before
    assert "loaded on cpu after 50 steps\n" in done.stdout


def test_a_checkpoint_that_exists_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    first = run("03_checkpoint_anywhere.py", "--checkpoint", str(file), cwd=tmp_path)
    second = run("03_checkpoint_anywhere.py", "--checkpoint", str(file), cwd=tmp_path)

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "100 in all" in first.stdout
    assert second.stdout.startswith("loaded on cpu after 100 steps\n")
    assert "150 in all" in second.stdout


def test_nested_batches_keep_their_types(tmp_path: Path) -> None:
    done = run("04_nested_batches.py", "--device", "meta", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "from cpu to meta\n"
        "types kept: Scene, Point\n"
        "factory of the defaultdict kept: True\n"
        "one tensor met twice is one tensor: True\n"
        "what is no tensor passes through: 'scene-1.png'\n"
        "moved again it is the very same object: True\n"
    )


def test_the_stray_is_found_and_mended(tmp_path: Path) -> None:
    done = run("05_find_the_stray.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    found, shown, mended = re.split(r"\n?\n== .* ==\n", f"\n{done.stdout}")[1:]
    assert found.startswith("1.mask is on cpu, but Sequential is on meta.")
    assert "self.register_buffer('mask', mask, persistent=False)" in found
    assert shown.startswith("1.mask is on cpu, but Sequential is on meta: a plain attribute")
    assert mended == "everything is on meta\nthe output is on meta, of shape (3, 5, 2)\n"


def test_a_model_of_a_class_one_cannot_edit_takes_inputs_from_anywhere(tmp_path: Path) -> None:
    done = run("06_wrap_a_model.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "the same object: True\n"
        "inputs on cpu, scores on cpu\n"
        "and vectors on cpu\n"
        "moved afterwards: scores on cpu\n"
        "with outputs='meta': scores on meta\n"
        "unwrapped: nothing is left\n"
    )


def test_nothing_stays_behind_on_the_cpu(tmp_path: Path) -> None:
    done = run("05_find_the_stray.py", "--device", "cpu", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "1.mask is on" not in done.stdout
    assert ".to() would leave 1.mask behind" in done.stdout
    assert "everything is on cpu\nthe output is on cpu, of shape (3, 5, 2)\n" in done.stdout

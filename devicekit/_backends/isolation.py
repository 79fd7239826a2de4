"""Ask questions in a child process, where a driver can block, crash or start without harm."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

__all__ = [
    "Answers",
    "Question",
    "ask_directly",
    "ask_in_child",
    "can_use_child",
    "in_bad_fork",
]

Question: TypeAlias = tuple[str, Callable[[Mapping[str, Any]], Any]]
"""A name, and what gives the answer from the answers before it."""

# Seconds for one question. nvidia-smi has 20 to itself where a GPU has to wake up first.
_LIMIT = 45.0
_GRACE = 1.0

# Open while CUDA or ROCm runs in a process, whoever started it; NVML does not open them.
_STARTED = ("/dev/nvidia-uvm", "/dev/kfd")


@dataclass
class Answers:
    """What came back.

    Attributes:
        values: The answers by the name of the question.
        failed: What was raised instead of an answer, by the name of the question.
        blocked: The question that was not answered in time, or None. Those after it are not asked.
        crashed: The question at which the child process ended, or None.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    blocked: str | None = None
    crashed: str | None = None


def ask_directly(questions: Sequence[Question]) -> Answers:
    """Ask in this process, without a limit of time."""
    answers = Answers()
    for name, question in questions:
        _ask(name, question, answers)
    return answers


def _ask(name: str, question: Callable[[Mapping[str, Any]], Any], answers: Answers) -> None:
    try:
        answers.values[name] = question(answers.values)
    except Exception as error:  # a driver or a plugin may raise anything
        answers.failed[name] = f"{type(error).__name__}: {error}"


def can_use_child() -> bool:
    """Return whether a forked child can ask what this process could.

    Not once a runtime has started here, which a child cannot use any more, and on Linux only: on
    macOS a forked process cannot use Metal, and Windows cannot fork.
    """
    if sys.platform != "linux":
        return False
    modules = (torch.cuda, torch.xpu, torch.mtia)
    return not (
        any(module.is_initialized() for module in modules)
        or in_bad_fork()
        or any(file.startswith(_STARTED) for file in _open_files())
    )


def in_bad_fork() -> bool:
    """Return whether this process was forked from one in which torch had started CUDA."""
    return bool(getattr(torch.cuda, "_is_in_bad_fork", bool)())


def _open_files() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
    return found


def ask_in_child(questions: Sequence[Question]) -> Answers | None:
    """Ask in a child process, with a limit of time for each question.

    Returns:
        The answers, or None where no process could be made.
    """
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():  # Python warns of forks in programs with threads
            warnings.simplefilter("ignore")
            pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    if pid == 0:
        _answer(questions, writing)
    os.close(writing)
    try:
        data, in_time = _receive(reading)
    finally:
        os.close(reading)
        _end(pid)
    return _unpack(data, in_time=in_time)


# ---- the child -----------------------------------------------------------------------------------


def _answer(questions: Sequence[Question], writing: int) -> NoReturn:
    """Send the name of each question before it is asked, and the answer after."""
    try:
        gc.disable()  # what the parent has not collected yet is not for a child to tear down
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # drivers print, and what is printed here is nobody's
            os.dup2(silence, stream)
        # What is decided in the child is nothing that has happened to the program.
        logging.getLogger("devicekit").addFilter(lambda _: False)
        answers = Answers()
        for name, question in questions:
            _send(writing, ("asked", name, None))
            _ask(name, question, answers)
            if name in answers.failed:
                _send(writing, ("failed", name, answers.failed[name]))
            else:
                _send(writing, ("answered", name, answers.values[name]))
        _send(writing, ("done", "", None))
    finally:
        os._exit(0)  # nothing of the parent's is run or flushed twice


def _send(writing: int, message: tuple[str, str, Any]) -> None:
    data = pickle.dumps(message)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(writing, data) :]


# ---- the parent ----------------------------------------------------------------------------------


def _receive(reading: int) -> tuple[bytes, bool]:
    """Return what the child has sent, and whether it ended in time."""
    data = b""
    deadline = time.monotonic() + _LIMIT
    poll = select.poll()
    poll.register(reading, select.POLLIN | select.POLLHUP)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            break
        part = os.read(reading, 1 << 16)
        if not part:
            return data, True
        data += part
        deadline = time.monotonic() + _LIMIT
    return data, False


def _end(pid: int) -> None:
    """End the child and what it has started; one that hangs in the driver is left to itself."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)


def _unpack(data: bytes, *, in_time: bool) -> Answers:
    values: dict[str, Any] = {}
    failed: dict[str, str] = {}
    open_question: str | None = None
    while len(data) >= 8:
        size = int.from_bytes(data[:8], "little")
        message, data = data[8 : 8 + size], data[8 + size :]
        if len(message) < size:
            break
        kind, name, value = pickle.loads(message)
        open_question = name if kind == "asked" else None
        if kind == "answered":
            values[name] = value
        elif kind == "failed":
            failed[name] = value
    return Answers(
        values,
        failed,
        blocked=None if in_time else open_question,
        crashed=open_question if in_time else None,
    )

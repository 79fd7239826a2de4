"""Findings about environment variables: what they hide, and what CUDA makes of a malformed one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from devicekit._backends.accelerator import Accelerator
from devicekit._backends.visibility import VARIABLES, select
from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import Finding, sentence, several

__all__ = ["changed", "double_mask", "hidden", "malformed", "nvml_check", "order", "ranks"]

# Values that are meant to hide every device.
_NONE = ("", "-1", "none", "void", "NoDevFiles")

# Read the way CUDA does: numbers or UUIDs, up to the first entry that names no device.
_LIKE_CUDA = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_NUMBERS_ONLY = ("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")
_NUMBERS = re.compile(r"(\s*[0-9]+(\.[0-9]+)*\s*,)*\s*[0-9]+(\.[0-9]+)*\s*")  # 0.1 is a tile

_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


def _shown(name: str, value: str) -> str:
    return f"{name}={value!r}"


def _of(facts: Facts) -> Mapping[str, Accelerator]:
    """Return the accelerator that each variable concerns, of those this build knows."""
    found: dict[str, Accelerator] = {}
    for accelerator in facts.accelerators:
        platform = "rocm" if accelerator.label == "ROCm" else accelerator.type
        found |= dict.fromkeys(VARIABLES.get(platform, ()), accelerator)
    return found


# ---- what they hide ------------------------------------------------------------------------------


def hidden(facts: Facts) -> Iterator[Finding]:
    """Variables that hide devices, all of them or some."""
    for accelerator in facts.accelerators:
        in_force = " and ".join(_shown(*pair) for pair in accelerator.visibility)
        names = " and ".join(name for name, _ in accelerator.visibility)
        if accelerator.reason == "hidden by a visibility variable":
            if any((*malformed(facts), *double_mask(facts))):
                continue  # which say it better
            what = f"{accelerator.label} device"
            known = accelerator.hidden
            which = f"all of {several(known, what)}" if known else f"every {what}"
            yield Finding(
                code="hidden-by-variable",
                severity="error",
                about=accelerator.type,
                cause=f"{in_force} hides {which}.",
                remedy=f"Unset {names}, or name devices in it, before the program starts.",
            )
        elif in_force and accelerator.devices and accelerator.hidden:
            seen, all_of = len(accelerator.devices), len(accelerator.devices) + accelerator.hidden
            yield Finding(
                code="partly-hidden",
                severity="note",
                about=accelerator.type,
                cause=f"{in_force} leaves {seen} of {several(all_of, 'device')} visible, "
                "numbered anew from 0.",
                remedy=f"Nothing to do if that is meant; otherwise change {names} before the "
                "program starts.",
            )


def changed(facts: Facts) -> Iterator[Finding]:
    """A variable that was set after CUDA had started, which is too late."""
    started, driver = facts.survey.started, facts.survey.driver
    value = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if started is None or driver is None or value is None or any(g.mig for g in driver.gpus):
        return
    uuids = [gpu.uuid for gpu in sorted(driver.gpus, key=lambda gpu: gpu.bus_id)]
    wanted = [_bare(uuids[i]) for i in select(value, uuids)]
    seen = [_bare(uuid) for uuid in started]
    alike = len({(gpu.name, gpu.capability) for gpu in driver.gpus}) == 1
    if wanted != seen and (alike or len(wanted) != len(seen)):
        yield Finding(
            code="variable-changed-late",
            severity="error",
            about="cuda",
            cause=f"CUDA_VISIBLE_DEVICES was changed to {value!r} after CUDA had started, which "
            f"goes on with the {several(len(seen), 'device')} that it saw then.",
            remedy="Set it before the program starts, not in it.",
        )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def double_mask(facts: Facts) -> Iterator[Finding]:
    """ROCm's variables, of which each numbers what the one before has left."""
    cuda = facts.accelerator("cuda")
    environ = facts.environ
    second = next(
        (n for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in environ), None
    )
    if cuda is None or cuda.label != "ROCm" or second is None:
        return
    if "ROCR_VISIBLE_DEVICES" not in environ:
        return
    first = ("ROCR_VISIBLE_DEVICES", environ["ROCR_VISIBLE_DEVICES"])
    yield Finding(
        code="rocm-double-mask",
        severity="warning" if cuda.devices else "error",
        about="cuda",
        cause=f"{_shown(*first)} hides devices first, and {_shown(second, environ[second])} then "
        "numbers those that are left, from 0.",
        remedy=f"Set one of them only: unset {first[0]}.",
    )


# ---- malformed ones ------------------------------------------------------------------------------


def malformed(facts: Facts) -> Iterator[Finding]:
    """Entries that do not say what they seem to say, and what was made of them."""
    concerned = _of(facts)
    for name, value in facts.environment:
        accelerator = concerned.get(name)
        if accelerator is None:
            continue
        if name in _LIKE_CUDA:
            yield from _like_cuda(facts, name, value, accelerator)
        elif name in _NUMBERS_ONLY and value.strip() and not _NUMBERS.fullmatch(value):
            yield Finding(
                code="malformed-variable",
                severity="warning",
                about=accelerator.type,
                cause=f"{_shown(name, value)} is not a list of numbers.",
                remedy=f"Write numbers with commas between them: {name}=0,1.",
            )


def _like_cuda(facts: Facts, name: str, value: str, accelerator: Accelerator) -> Iterator[Finding]:
    if value.strip() in _NONE:
        return
    uuids = _uuids(facts, name)
    entries = [entry.strip() for entry in value.split(",")]
    repeated = [e for i, e in enumerate(entries) if e and e in entries[:i]]
    bad = next((entry for entry in entries if not _well_formed(entry, entries)), None)
    made = _made_of(value, uuids, accelerator)
    if bad is not None:
        yield Finding(
            code="malformed-variable",
            severity="warning" if accelerator.devices else "error",
            about=accelerator.type,
            cause=f"{_shown(name, value)} has the entry {bad!r}, which is neither a number nor a "
            f"UUID{'' if entries[0] == bad else ' like those before it'}; {accelerator.label} "
            f"reads the list as {made}.",
            remedy=f"Write numbers with commas between them, such as {name}=0,1, or UUIDs only.",
        )
    elif repeated:
        yield Finding(
            code="duplicate-entry",
            severity="error",
            about=accelerator.type,
            cause=f"{_shown(name, value)} names {repeated[0]} twice, for which "
            f"{accelerator.label} hides every device.",
            remedy=f"Name each device once in {name}.",
        )
    elif uuids is not None:
        yield from _unknown(name, value, accelerator, uuids)


def _unknown(
    name: str, value: str, accelerator: Accelerator, uuids: Sequence[str]
) -> Iterator[Finding]:
    entries = [entry.strip() for entry in value.split(",")]
    chosen = select(value, uuids)
    if len(chosen) >= len(entries) or entries[0].startswith("MIG-"):
        return
    entry = entries[len(chosen)]
    matches = sum(uuid.startswith(entry) for uuid in uuids)
    why = "fits several of" if matches > 1 else "is none of"
    yield Finding(
        code="unknown-entry",
        severity="warning" if chosen else "error",
        about=accelerator.type,
        cause=f"{_shown(name, value)} ends for {accelerator.label} at the entry {entry!r}, which "
        f"{why} the {several(len(uuids), 'device')} here.",
        remedy=f"Name devices of this machine in {name}: numbers below {len(uuids)}, or UUIDs.",
    )


def _well_formed(entry: str, entries: Sequence[str]) -> bool:
    """Whether an entry is what those before it are: a number, or a UUID."""
    if _UUID.match(entries[0]):
        return _UUID.fullmatch(entry) is not None
    return re.fullmatch(r"[0-9]+", entry) is not None


def _made_of(value: str, uuids: Sequence[str] | None, accelerator: Accelerator) -> str:
    """Return which devices a list leaves, as the driver counts them."""
    chosen = select(value, uuids if uuids is not None else [f"GPU-?{i}" for i in range(128)])
    if chosen:
        return ", ".join(map(str, chosen))
    return "no device" if uuids is not None or not accelerator.devices else "what it knows of it"


def _uuids(facts: Facts, name: str) -> list[str] | None:
    """Return the UUIDs of the devices that a variable chooses from, or None if they are unknown."""
    if name != "CUDA_VISIBLE_DEVICES" or facts.survey.driver is None:
        return None
    gpus = sorted(facts.survey.driver.gpus, key=lambda gpu: gpu.bus_id)
    return [gpu.uuid for gpu in gpus] or None


# ---- others --------------------------------------------------------------------------------------


def nvml_check(facts: Facts) -> Iterator[Finding]:
    """A variable that keeps torch from asking CUDA itself."""
    if facts.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1" and facts.accelerator("cuda"):
        failed = facts.refused_to_start is not None
        yield Finding(
            code="nvml-based-check",
            severity="warning" if failed else "note",
            about="cuda",
            cause="PYTORCH_NVML_BASED_CUDA_CHECK=1 makes torch.cuda.is_available() count the "
            "devices that the management library knows, without asking whether CUDA starts"
            + (", and it does not." if failed else "."),
            remedy="Unset it where is_available() has to be true to the letter.",
        )


def order(facts: Facts) -> Iterator[Finding]:
    """GPUs of several models, which CUDA and nvidia-smi number each in its own way."""
    gpus = facts.survey.driver.gpus if facts.survey.driver else ()
    cuda = facts.accelerator("cuda")
    by_bus = facts.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if cuda and len(cuda.devices) > 1 and len({gpu.name for gpu in gpus}) > 1 and not by_bus:
        yield Finding(
            code="order-differs",
            severity="note",
            about="cuda",
            cause="The GPUs are of several models, so CUDA numbers the fastest first, and "
            "nvidia-smi goes by the PCI bus.",
            remedy="Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number them the same way.",
        )


def ranks(facts: Facts) -> Iterator[Finding]:
    """A launcher that started more processes than there are devices, or that auto() refuses."""
    sizes = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    environ = facts.environ
    size = next((s for s in sizes if re.fullmatch(r"[0-9]{1,6}", environ.get(s, ""))), None)
    crowded = False
    for accelerator in facts.accelerators:
        seen = len(accelerator.devices)
        # A launcher may show each process a device of its own.
        own = seen == 1 and accelerator.visibility and accelerator.hidden != 0
        if size and seen and not own and int(environ[size]) > seen:
            crowded = True
            yield Finding(
                code="too-many-ranks",
                severity="warning" if facts.choice else "error",
                about=accelerator.type,
                cause=f"{size} is {environ[size]}, and this process sees "
                f"{several(seen, f'{accelerator.type} device')}.",
                remedy=f"Start at most {several(seen, 'process').replace('processs', 'processes')} "
                "on this machine.",
            )
    if facts.choice is None and not crowded and not facts.blocked and not facts.crashed:
        yield Finding(
            code="auto-refuses",
            severity="error",
            about="",
            cause=sentence(f"devicekit.auto() refuses to choose: {facts.choice_reason}"),
            remedy="Correct or unset the variable that it names.",
        )

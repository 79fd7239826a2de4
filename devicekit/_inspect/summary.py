"""From what was found to a report."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from devicekit._inspect.device import device_of
from devicekit._inspect.report import DeviceReport, Located, Part, Place
from devicekit._inspect.survey import Held, Survey

__all__ = ["home_of", "located", "report_on"]

_EXAMPLES = 3


def report_on(obj: object) -> DeviceReport:
    """Return the report on an object."""
    survey = Survey(obj)
    input_device = device_of(obj, None)
    home = home_of(survey, input_device)
    placeholders = list(survey.placeholders())
    hidden = {id(held) for held in placeholders}
    firm = [held for held in survey.held if held.role != "stray" and id(held) not in hidden]
    spread = dict.fromkeys([held.device for held in firm])
    if len(spread) > 1:
        spread = dict.fromkeys(held.device for held in firm if not held.is_scalar())
    away = [located(h) for h in firm if len(spread) > 1 and _is_away(h, home, survey)]
    strays = [held for held in survey.held if held.role == "stray"]
    registered = ("parameter", "buffer")
    return DeviceReport(
        name=type(obj).__name__,
        places=tuple(_places(survey.held)),
        home=home,
        input_device=input_device,
        parts=tuple(_parts(firm)) if len(spread) > 1 else (),
        away=tuple(away),
        strays=tuple(located(held, _why(held, home, survey)) for held in strays),
        aliases=tuple(survey.aliases),
        stale=tuple(_stale(strays, survey.held)),
        left=tuple(located(held, why) for held, why in survey.left),
        ties=tuple((name, *others) for name, others in survey.same.items()),
        torn=tuple(_torn(obj, survey, hidden)),
        lazy=tuple(survey.marked["lazy"]),
        meta=tuple(h.path for h in firm if h.device.type == "meta" and h.role in registered),
        offloaded=tuple(held.path for held in placeholders),
        quantized=tuple(survey.marked["quantized"]),
        sharded=tuple(survey.marked["sharded"]),
        replicas=tuple(p for p, m in survey.modules if m.__dict__.get("_is_replica")),
        mislabelled=tuple(_mislabelled(survey)),
        baked=tuple(dict.fromkeys(_baked(survey.modules))),
        _split_over=tuple(spread),
    )


def home_of(survey: Survey, input_device: torch.device | None) -> torch.device | None:
    """Return where what is in an object belongs: where hooks say, else where most of it is."""
    if survey.rules:
        return input_device
    heavy = [held for held in survey.held if not held.is_scalar()] or survey.held
    firm = [held for held in heavy if held.role != "stray"] or heavy
    sizes: dict[torch.device, int] = defaultdict(int)
    for held in firm:
        sizes[held.device] += held.nbytes
    if not sizes:
        return input_device

    def weight(device: torch.device) -> tuple[bool, int, bool]:
        return device.type != "meta", sizes[device], device == input_device

    return max(sizes, key=weight)


def located(held: Held, why: str = "") -> Located:
    """Return what a report says of a tensor."""
    tensor = held.tensor
    if tensor is None:
        return Located(held.path, held.device, None, None, why)
    shape = None if is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)
    return Located(held.path, held.device, shape, tensor.dtype, why)


def _is_away(held: Held, home: torch.device | None, survey: Survey) -> bool:
    if held.is_scalar():
        return False
    rule = survey.rule(held.path)
    return held.device != home if rule is None else not rule.allows(held.device)


def _why(held: Held, home: torch.device | None, survey: Survey) -> str:
    return f"the rest is on {home}" if _is_away(held, home, survey) else ""


def _places(found: Iterable[Held]) -> Iterator[Place]:
    """Yield what is on each device, the one with the most bytes first."""
    by_device: dict[torch.device, list[Held]] = defaultdict(list)
    for held in found:
        by_device[held.device].append(held)
    sizes = {device: sum(h.nbytes for h in there) for device, there in by_device.items()}
    for device, there in sorted(by_device.items(), key=lambda item: -sizes[item[0]]):
        roles = [held.role for held in there]
        parameters, buffers = roles.count("parameter"), roles.count("buffer")
        yield Place(
            device=device,
            parameters=parameters,
            buffers=buffers,
            others=len(there) - parameters - buffers,
            bytes=sizes[device],
            examples=tuple(h.path for h in heapq.nlargest(_EXAMPLES, there, key=_size)),
        )


def _size(held: Held) -> int:
    return held.nbytes


def _parts(found: Iterable[Held]) -> Iterator[Part]:
    """Yield the largest sub-modules that are on one device, those with the most bytes first."""
    inside: dict[str, dict[torch.device, tuple[int, int]]] = defaultdict(dict)
    for held in found:
        path = held.path
        while path:
            path = path.rpartition(".")[0]
            tensors, nbytes = inside[path].get(held.device, (0, 0))
            inside[path][held.device] = tensors + 1, nbytes + held.nbytes
    whole = [
        Part(path, device, *numbers)
        for path, devices in inside.items()
        for device, numbers in devices.items()
        if path and len(devices) == 1 and len(inside[path.rpartition(".")[0]]) > 1
    ]
    yield from sorted(whole, key=lambda part: -part.bytes)


def _stale(strays: Iterable[Held], found: Iterable[Held]) -> Iterator[tuple[str, str]]:
    """Yield the strays that may have been a buffer before it was moved: no other has the shape."""
    away = [(held, held.tensor) for held in strays if held.tensor is not None]
    if not away:
        return
    alike: dict[Any, list[Held]] = defaultdict(list)
    for held in found:
        if held.role == "buffer" and held.tensor is not None:
            alike[held.tensor.shape, held.tensor.dtype].append(held)
    for stray, tensor in away:
        buffers = alike[tensor.shape, tensor.dtype]
        if len(buffers) == 1 and buffers[0].device != stray.device and tensor.dim() > 0:
            yield stray.path, buffers[0].path


def _torn(obj: object, survey: Survey, hidden: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that transformers should have tied, and that are two."""
    if not survey.modules:
        return
    by_path = {held.path: held for held in survey.held}
    tied = {name: first for first, others in survey.same.items() for name in others}
    for path, module in survey.modules:
        if not hasattr(type(module), "_tied_weights_keys"):
            continue
        prefix = f"{path}." if path else ""
        for target, source in _declared_ties(module).items():
            first = tied.get(prefix + target, prefix + target)
            second = tied.get(prefix + source, prefix + source)
            pair = by_path.get(first), by_path.get(second)
            if first != second and None not in pair and not hidden & set(map(id, pair)):
                yield prefix + target, prefix + source


def _declared_ties(module: nn.Module) -> Mapping[str, str]:
    """Return which of its parameters a model says are tied to which."""
    declared: Any = module.__dict__.get("all_tied_weights_keys")
    if isinstance(declared, dict):
        return cast("dict[str, str]", declared)
    keys: Any = getattr(type(module), "_tied_weights_keys", None)  # before transformers 5
    config: Any = getattr(module, "config", None)
    tying = bool(getattr(config, "tie_word_embeddings", False))
    if not isinstance(keys, list) or not tying:
        return {}
    model: Any = module
    embeddings: Any = model.get_input_embeddings()
    names = {id(p): name for name, p in module.named_parameters()}
    source = names.get(id(getattr(embeddings, "weight", None)))
    return {} if source is None else dict.fromkeys(cast("list[str]", keys), source)


def _mislabelled(survey: Survey) -> Iterator[Located]:
    """Yield the attributes that name a device where nothing is."""
    here = {held.device for held in survey.held}
    for path, device in survey.devices:
        if here and not any(
            device.type == other.type and device.index in (None, other.index) for other in here
        ):
            yield Located(path, device, None, None, "nothing of it is there")


def _baked(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield the devices that are written into graphs, which `Module.to` does not change."""
    for _, module in modules:
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                for value in (*node.args, *node.kwargs.values()):
                    if isinstance(value, torch.device):
                        yield str(value)
        elif isinstance(module, torch.jit.ScriptModule) and hasattr(module, "graph"):
            yield from _CONSTANT.findall(str(module.graph))


_CONSTANT = re.compile(r'Device = prim::Constant\[value="([^"]+)"\]')

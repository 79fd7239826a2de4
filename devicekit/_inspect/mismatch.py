"""Say who is on the wrong device before torch says that somebody is."""

# pyright: reportPrivateUsage=false
# Of torch: the public ways to its stores are slow.

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from devicekit._inspect.device import execution_device
from devicekit._inspect.summary import home_of
from devicekit._inspect.survey import Held, Survey
from devicekit._inspect.text import enumerated, shortened, tabulated
from devicekit._tree import walk
from devicekit.errors import DeviceMismatchError, InvalidDeviceError

__all__ = ["check_call"]

_MOST = 10  # offenders that are listed


def check_call(
    model: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Do what `devicekit.check` promises."""
    if not callable(model):
        msg = (
            f"check() was given a {type(model).__name__} first, which cannot be called: expected "
            f"the model, then what it is called with. Write check(model, batch)."
        )
        raise InvalidDeviceError(msg)
    survey = Survey(model)
    layers = list(_layers(model))
    inputs = list(_inputs(layers[-1], args, kwargs))
    home = _home(survey, layers, inputs)
    wrong: list[Held] = []
    if not any(map(_brings_inputs, layers)):
        wrong += (held for held in inputs if held.device != home and not held.is_scalar())
    sharded = set(survey.marked["sharded"])  # whoever shards them gathers them where it computes
    for held in survey.held:
        rule = survey.rule(held.path)
        fine = held.device == home if rule is None else rule.allows(held.device)
        if not (fine or held.is_scalar() or held.path in sharded):
            wrong.append(held)
    if wrong:
        _refuse(layers[-1], survey, wrong, home)


def _home(survey: Survey, layers: Sequence[object], inputs: Sequence[Held]) -> torch.device | None:
    """Return where everything should be."""
    for layer in layers:
        if isinstance(layer, nn.DataParallel) and layer.device_ids:
            return torch.device(layer.src_device_obj)
    model = layers[0]
    home = home_of(survey, execution_device(model) if isinstance(model, nn.Module) else None)
    if home is None:
        found = Counter(held.device for held in inputs if not held.is_scalar())
        return found.most_common(1)[0][0] if found else None
    return home


# ---- the inputs ----------------------------------------------------------------------------------

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_forward_module", "module")


def _layers(model: object) -> Iterator[object]:
    """Yield a model and, from the outside in, what is wrapped by those that pass all inputs on."""
    yield model
    while isinstance(model, nn.Module) and hasattr(model, "_modules"):
        inner = next((model._modules[name] for name in _INNER if name in model._modules), None)
        kinds = {parameter.kind for parameter in _parameters(type(model).forward)[1:]}
        if inner is None or not kinds <= _VARIADIC:
            return
        model = inner
        yield model


_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in
        return []


def _brings_inputs(layer: object) -> bool:
    """Return whether a module is given its inputs where it is, by a hook or by itself."""
    if not isinstance(layer, nn.Module) or not hasattr(layer, "_modules"):
        return False
    if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return bool(layer.device_ids)
    hooks = cast("dict[Any, Any]", layer._forward_pre_hooks)
    own: Any = hooks.get("devicekit.wrap")
    return (
        "_hf_hook" in layer.__dict__
        or "_fsdp_wrapped_module" in layer._modules
        or hasattr(type(layer), "_get_fsdp_state")
        or (own is not None and "forward" in own.options.methods)
    )


def _inputs(model: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[Held]:
    """Yield the tensors in the arguments of a call."""
    for name, value in _named(model, args, kwargs):
        for path, leaf in walk(value, name, opaque=True):
            # The batch sizes of a PackedSequence are on the CPU always.
            if isinstance(leaf, Tensor) and not path.endswith(".batch_sizes"):
                yield Held(path, "input", leaf.device, 0, leaf)


def _named(
    model: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[tuple[str, object]]:
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built in, or called the wrong way, which is not asked here
        yield from ((f"args[{index}]", value) for index, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


# ---- the message ---------------------------------------------------------------------------------


def _refuse(
    model: object, survey: Survey, wrong: Sequence[Held], home: torch.device | None
) -> NoReturn:
    name = type(model).__name__
    here = [held.path for held in survey.held if held.device == home]
    groups: dict[torch.device, list[str]] = {}
    for held in wrong:
        groups.setdefault(held.device, []).append(held.path)
    clauses = [
        f"{enumerated(paths)} {'is' if len(paths) == 1 else 'are'} on {device}"
        for device, paths in groups.items()
    ]
    rest = "the others are" if all(h.role == "input" for h in wrong) and not here else f"{name} is"
    own = f" ({enumerated(here)})" if here and not _inside(wrong) else ""
    body = [
        (held.role, shortened(held.path), str(held.device), _shape(held.tensor))
        for held in wrong[:_MOST]
    ]
    lines = [
        f"{' and '.join(clauses)}, but {rest} on {home}{own}.",
        "",
        *tabulated(("what", "path", "device", "shape"), body, numbers=()),
        *([f"and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []),
        "",
        *_ways_out(model, survey, wrong, home),
    ]
    message = "\n".join(lines)
    devices = (*([] if home is None else [home]), *(d for d in groups if d != home))
    raise DeviceMismatchError(message, devices=devices, paths=tuple(held.path for held in wrong))


def _inside(wrong: Sequence[Held]) -> bool:
    return any(held.role != "input" for held in wrong)


def _shape(tensor: Tensor | None) -> str:
    if tensor is None or tensor.is_nested:
        return ""
    try:
        return str(tuple(tensor.shape))
    except RuntimeError:  # not initialised yet
        return ""


def _ways_out(
    model: object, survey: Survey, wrong: Sequence[Held], home: torch.device | None
) -> Iterator[str]:
    """Yield what to write to mend it."""
    roles = {held.role for held in wrong}
    where = str(home)
    if "input" in roles:
        yield "To move the inputs:   batch = devicekit.move(model, batch)"
        others = {held.device for held in wrong}
        if roles == {"input"} and survey.held and len(others) == 1 and where in ("cpu", "meta"):
            yield f"or the model:         model = devicekit.move(model, {str(*others)!r})"
    if any(held.device.type == "meta" and held.role in ("parameter", "buffer") for held in wrong):
        yield "To load the weights:  model.load_state_dict(state, assign=True)"
    elif roles & {"parameter", "buffer", "state", "data"}:
        yield f"To move the model:    model = devicekit.move(model, {where!r})"
    strays = [held.path for held in wrong if held.role == "stray"]
    if strays:
        attribute = strays[0].rpartition(".")[2]
        if attribute.isidentifier():
            yield "To have it moved with the model from now on, write in its __init__"
            yield f"    self.register_buffer({attribute!r}, {attribute}, persistent=False)"
            yield f"in place of self.{attribute} = {attribute}."
        else:
            yield "To have it moved with the model: register_buffer(), ModuleList, or ModuleDict."

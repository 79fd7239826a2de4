"""One pass over an object: every tensor it holds, by name, with what is odd about it."""

# pyright: reportPrivateUsage=false
# Of torch: the public ways to its stores are slow.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from devicekit._inspect.device import moves_itself
from devicekit._inspect.hooks import Rule, rule_of
from devicekit._inspect.memory import block_of, blocks_of
from devicekit._inspect.strays import attribute_names, attributes_of
from devicekit._tree import walk
from devicekit._types import CPU

__all__ = ["Held", "Role", "Survey"]

Role: TypeAlias = Literal["parameter", "buffer", "state", "stray", "data", "input"]


class Held(NamedTuple):
    """A tensor that was found.

    Attributes:
        path: Where it stands.
        role: What it is there.
        device: Where it is.
        nbytes: The memory it holds and does not share with one that was found before.
        tensor: The tensor, or None for packed weights.
    """

    path: str
    role: Role
    device: torch.device
    nbytes: int
    tensor: Tensor | None

    def is_scalar(self) -> bool:
        """Return whether torch takes it on the CPU whatever device the rest is on."""
        tensor = self.tensor
        if tensor is None or self.device.type != "cpu" or is_lazy(tensor):
            return False
        return tensor.dim() == 0


class Survey:
    """What was found in an object.

    Attributes:
        held: Every tensor, once, in order.
        modules: Every module by path, once.
        rules: What accelerate's hooks say, by the path of the sub-module each is on.
        same: Further names of tensors that have several, by the name found first.
        aliases: Plain attributes that are buffers as well, with the name of the buffer.
        devices: Attributes that are devices.
        marked: Names of parameters of a kind: lazy, quantized or sharded.
        left: State of optimizers that is not where its parameter is, and parameters of optimizers
            that are in none of the modules, with what is wrong.
    """

    def __init__(self, obj: object) -> None:
        self.held: list[Held] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.rules: dict[str, Rule] = {}
        self.same: dict[str, list[str]] = {}
        self.aliases: list[tuple[str, str]] = []
        self.devices: list[tuple[str, torch.device]] = []
        self.marked: dict[str, list[str]] = {"lazy": [], "quantized": [], "sharded": []}
        self.left: list[tuple[Held, str]] = []
        self._places: dict[int, int] = {}  # where in `held` a tensor is, by its id
        self._blocks: dict[int, int] = {}  # where in `held` the first owner of memory is
        self._met: dict[int, str] = {}  # modules by id
        self._kept: list[Any] = []  # what must live as long as its id stands above
        self._run(obj)

    def _run(self, obj: object) -> None:
        optimizers: list[tuple[str, Optimizer]] = []
        if isinstance(obj, nn.Module):
            self._register("", obj)
        else:
            data = list(walk(obj, opaque=True))
            self._kept.append(data)
            for path, leaf in data:
                if isinstance(leaf, nn.Module):
                    self._register(path.removeprefix("."), leaf)
            for path, leaf in data:
                if isinstance(leaf, Tensor):
                    self._add(path.removeprefix(".") or type(leaf).__name__, "data", leaf)
                elif isinstance(leaf, Optimizer):
                    optimizers.append((path.removeprefix("."), leaf))
        alone = not self.modules
        self._attributes(self.modules)
        for path, optimizer in optimizers:
            self._optimizer(f"{path}." if path else "", optimizer, alone=alone)

    # ---- parameters and buffers ------------------------------------------------------------------

    def _register(self, root: str, module: nn.Module, role: Role | None = None) -> None:
        """Add a module and its sub-modules with their parameters and buffers."""
        stack = [(root, module)]
        while stack:
            path, module = stack.pop()
            if not hasattr(module, "_parameters"):  # `super().__init__()` was not called in its own
                continue
            first = self._met.setdefault(id(module), path)
            if first is not path:
                self._again(first, path, module)
                continue
            self.modules.append((path, module))
            prefix = f"{path}." if path else ""
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    self._add(prefix + key, role or "parameter", tensor)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._add(prefix + key, role or "buffer", buffer)
            state = module.__dict__
            if "_former_parameters" in state:  # a DataParallel replica: they are attributes
                for key, tensor in state["_former_parameters"].items():
                    self._add(prefix + key, role or "parameter", tensor)
            if "_hf_hook" in state:
                rule = rule_of(state["_hf_hook"])
                if rule is not None:
                    self.rules[path] = rule
            children = module._modules
            if children:
                named = [(prefix + k, child) for k, child in children.items() if child is not None]
                stack.extend(reversed(named))

    def _again(self, first: str, path: str, module: nn.Module) -> None:
        """Note the further names that the tensors of a module get where it stands once more."""
        for key, _ in module.named_parameters():
            names = self.same.setdefault(f"{first}.{key}" if first else key, [])
            names.append(f"{path}.{key}")

    def _add(self, path: str, role: Role, tensor: Tensor) -> None:
        place = self._places.setdefault(id(tensor), len(self.held))
        if place != len(self.held):
            name = self.held[place].path
            if name != path:
                self.same.setdefault(name, []).append(path)
            return
        cls = type(tensor)
        plain = cls is nn.Parameter or cls is Tensor
        if plain and tensor.layout is torch.strided:
            block, storage_bytes = block_of(tensor)
            nbytes = 0 if block in self._blocks else storage_bytes
            owner = self._blocks.setdefault(block, place)
            if owner != place and role == "parameter" and _is_same(tensor, self.held[owner].tensor):
                self.same.setdefault(self.held[owner].path, []).append(path)
        else:
            nbytes = 0
            for block, size in blocks_of(tensor):
                if self._blocks.setdefault(block, place) == place:
                    nbytes += size
        self.held.append(Held(path, role, tensor.device, nbytes, tensor))
        if not plain:
            self._special(path, tensor)
        elif tensor.is_quantized:
            self.marked["quantized"].append(path)

    def _special(self, path: str, tensor: Tensor) -> None:
        """Note what kind of tensor an unusual class makes, and what objects of it carry along."""
        names = {base.__name__ for base in type(tensor).__mro__}
        if is_lazy(tensor):
            self.marked["lazy"].append(path)
        elif names & {"DTensor", "FlatParameter", "ShardedTensor"}:
            self.marked["sharded"].append(path)
        elif tensor.is_quantized or names & _QUANTIZED or _library(tensor) in _QUANTIZERS:
            self.marked["quantized"].append(path)
            for key, value in tensor.__dict__.items():  # its scales and codes
                for inner, leaf in walk(value, f"{path}.{key}", opaque=True, limit=1_000):
                    if isinstance(leaf, Tensor):
                        self._add(inner, "state", leaf)

    # ---- plain attributes ------------------------------------------------------------------------

    def _attributes(
        self, modules: Iterable[tuple[str, nn.Module]], *, unregistered: bool = False
    ) -> None:
        registered = {held.device for held in self.held}
        shared: set[int] = set()  # objects that many modules refer to, such as a configuration
        for path, module in list(modules):
            if not attribute_names(module.__dict__):  # asked here, as most have none
                continue
            # As metrics move their state, where somebody moves the metric.
            own = moves_itself(module) and not unregistered
            for name, leaf in attributes_of(module, path, shared):
                if isinstance(leaf, Tensor):
                    self._attribute(name, leaf, registered, "state" if own else "stray")
                elif isinstance(leaf, torch.device):
                    self.devices.append((name, leaf))
                elif isinstance(leaf, nn.Module):
                    self._unregistered(name, leaf)
                else:
                    self.held.append(Held(name, "state", CPU, 0, None))
                    self.marked["quantized"].append(name)

    def _attribute(
        self, name: str, tensor: Tensor, registered: set[torch.device], role: Role
    ) -> None:
        place = self._places.get(id(tensor))
        if place is not None:
            held = self.held[place]
            if held.role == "buffer" and name != held.path:
                self.aliases.append((name, held.path))
            return
        # The result of a computation is made anew where the weights are, unless it never is.
        if tensor.grad_fn is None or (registered and tensor.device not in registered):
            self._kept.append(tensor)
            self._add(name, role, tensor)

    def _unregistered(self, path: str, module: nn.Module) -> None:
        if id(module) in self._met:
            return
        start = len(self.modules)
        self._register(path, module, "stray")
        self._attributes(self.modules[start:], unregistered=True)

    # ---- optimizers ------------------------------------------------------------------------------

    def _optimizer(self, prefix: str, optimizer: Optimizer, *, alone: bool) -> None:
        number = 0
        for index, group in enumerate(optimizer.param_groups):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for position, parameter in enumerate(group["params"]):
                path = f"{prefix}param_groups[{index}]['params'][{position}]"
                if not alone and id(parameter) not in self._places:
                    orphan = Held(path, "data", parameter.device, 0, parameter)
                    self.left.append((orphan, "in no module: what it trains is used by nobody"))
                if id(parameter) not in self._places:
                    self._add(path, "parameter", parameter)
                state = optimizer.state.get(parameter, {})
                for inner, leaf in walk(state, f"{prefix}state[{number}]"):
                    if isinstance(leaf, Tensor):
                        self._state(inner, leaf, parameter, on_device=on_device)
                number += 1

    def _state(self, path: str, tensor: Tensor, parameter: Tensor, *, on_device: bool) -> None:
        self._add(path, "state", tensor)
        if tensor.device == parameter.device:
            return
        if path.endswith("['step']") and tensor.device == CPU and not on_device:
            return  # torch keeps it there, pytorch#103256
        held = Held(path, "state", tensor.device, 0, tensor)
        self.left.append((held, f"its parameter is on {parameter.device}"))

    # ---- questions -------------------------------------------------------------------------------

    def rule(self, path: str) -> Rule | None:
        """Return the rule of the nearest module above a tensor that has one."""
        while self.rules and path:
            path = path.rpartition(".")[0]
            if path in self.rules:
                return self.rules[path]
        return None

    def placeholders(self) -> Iterator[Held]:
        """Yield the tensors that are on meta because a hook brings them back for each forward."""
        if any(rule.offloads for rule in self.rules.values()):
            for held in self.held:
                if held.device.type == "meta":
                    rule = self.rule(held.path)
                    if rule is not None and rule.offloads:
                        yield held


_QUANTIZED = frozenset(("Int8Params", "Params4bit", "QTensor"))
_QUANTIZERS = frozenset(("bitsandbytes", "torchao", "optimum"))


def _library(tensor: Tensor) -> str:
    return type(tensor).__module__.partition(".")[0]


def _is_same(tensor: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors that share memory are the same part of it."""
    return (
        other is not None
        and tensor.shape == other.shape
        and tensor.storage_offset() == other.storage_offset()
    )

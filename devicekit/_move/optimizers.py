"""Move an optimizer's state to its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from devicekit._tree import Job, rebuild

__all__ = ["move_optimizer"]


def move_optimizer(optimizer: Optimizer) -> Optimizer:
    """Move an optimizer's state to where its parameters are, and return the optimizer.

    By torch's own rule (`Optimizer.load_state_dict`): state goes with its parameter, but `step`
    stays on the CPU unless the group is `capturable` or `fused`; moving it would make every step
    wait for the device (pytorch#103256). Tensor hyperparameters such as `lr` go by the rule of
    `step`. Nothing is changed until everything has been copied.
    """
    writes: list[tuple[dict[Any, Any], Any, Any]] = []
    for group in optimizer.param_groups:
        parameters: list[Tensor] = group["params"]
        steps_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            device = parameter.device
            step_device = device if steps_on_device else torch.device("cpu")
            for key, value in state.items():
                new = rebuild(value, Job.towards(step_device if key == "step" else device))
                if new is not value:
                    writes.append((state, key, new))
        if parameters:
            device = parameters[0].device if steps_on_device else torch.device("cpu")
            for key, value in group.items():
                new = value if key == "params" else rebuild(value, Job.towards(device))
                if new is not value:
                    writes.append((group, key, new))
    for target, key, new in writes:
        target[key] = new
    return optimizer

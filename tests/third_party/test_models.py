"""Models that other libraries have taken over: where their inputs belong, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import devicekit

CPU, META = torch.device("cpu"), torch.device("meta")


def test_an_offloaded_model_takes_its_inputs_where_it_is_executed() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Sequential(nn.Linear(2, 2)), CPU)  # its weights are on meta

    assert next(model.parameters()).device == META
    assert devicekit.device_of(model) == CPU
    assert model(devicekit.move(model, torch.ones(1, 2))).device == CPU


def test_an_offloaded_model_is_not_moved() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Sequential(nn.Linear(2, 2)), CPU)

    with pytest.raises(devicekit.MoveError, match="accelerate"):
        devicekit.move(model, "cpu")


def test_a_model_that_fabric_has_set_up_takes_batches() -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    bare = nn.Linear(2, 1)
    model, _ = fabric.setup(bare, torch.optim.SGD(bare.parameters()))

    batch = devicekit.move(model, {"input": torch.ones(3, 2)})

    assert devicekit.device_of(model) == CPU
    assert model(**batch).shape == (3, 1)


def test_a_metric_moves_with_its_state() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()
    metric.update(torch.tensor([1.0, 3.0]))

    moved = devicekit.move(metric, "cpu")

    assert moved is metric
    assert moved.compute().item() == 2.0

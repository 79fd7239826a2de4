"""The libraries whose objects users move: imported here, or their tests are skipped.

With `DEVICEKIT_TEST_REQUIRE_THIRD_PARTY` set, a library that is not installed is an error.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import machines
import pytest
import torch

LIBRARIES = (
    *("accelerate", "ignite", "lightning_fabric", "optree", "skorch"),
    *("tensordict", "torch_geometric", "torchmetrics", "transformers"),
)
REQUIRED = bool(os.environ.get("DEVICEKIT_TEST_REQUIRE_THIRD_PARTY"))


def import_library(name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of among themselves is not tested here
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if REQUIRED:
            msg = f"{name} cannot be imported ({error}). Install devicekit[third-party]."
            raise pytest.UsageError(msg) from error


core: Any = torch._C
if machines.FAKE:  # torch asks the CUDA library for it, of which a fake has none; PyG reads it
    core._show_config = lambda: "PyTorch built with:\n  - a fake accelerator\n"
for library in LIBRARIES:
    import_library(library)

"""Why a module cannot be moved, said before anything moves; no accelerator is needed for that."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from devicekit import InvalidDeviceError, MoveError, move

if TYPE_CHECKING:
    from pathlib import Path

META = torch.device("meta")
CPU = torch.device("cpu")


def refusal(module: nn.Module, where: Any = "meta") -> MoveError:
    """Return the error with which a module is refused, of which nothing has moved."""
    before = [(tensor, tensor.device) for tensor in module.state_dict(keep_vars=True).values()]
    with pytest.raises(MoveError, match=f"cannot be moved to {where}: ") as info:
        move(module, where)
    after = list(module.state_dict(keep_vars=True).values())
    assert all(tensor is old for tensor, (old, _) in zip(after, before, strict=True))
    assert [tensor.device for tensor in after] == [device for _, device in before]
    assert info.value.target == torch.device(where)
    return info.value


# On meta


def test_a_module_without_values_is_refused() -> None:
    error = refusal(nn.Linear(2, 2, device="meta"), "cpu")

    assert str(error) == (
        "Linear cannot be moved to cpu: weight and 1 more are on the meta device: there are no "
        "values to move. Load the weights first, with load_state_dict(..., assign=True); "
        "to_empty() leaves garbage."
    )
    assert error.path == "weight"


def test_a_module_of_which_a_part_has_no_values_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False, device="meta"))

    error = refusal(module, "cpu")

    assert "1.weight is on the meta device" in str(error)
    assert error.path == "1.weight"


def test_buffers_without_values_are_refused_too() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2, device="meta"))

    assert refusal(module, "cpu").path == "mask"


def test_the_way_out_of_meta_works() -> None:
    module = nn.Linear(2, 2, device="meta")
    module.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)

    assert move(module, "cpu") is module


def test_towards_meta_everything_keeps_its_identity() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module(torch.randn(2, 3)).sum().backward()
    before = [*module.parameters(), *module.buffers()]
    grad = module[0].weight.grad

    move(module, "meta")

    assert all(
        a is b for a, b in zip([*module.parameters(), *module.buffers()], before, strict=True)
    )
    assert {tensor.device for tensor in before} == {META}
    assert module[0].weight.grad is grad
    assert grad.device == META


def test_what_is_there_is_left_alone() -> None:
    module = nn.Linear(2, 2, device="meta")

    assert move(module, "meta") is module
    assert move(nn.Linear(2, 2), "cpu:0").weight.device == CPU


# By accelerate


def hook(**attributes: Any) -> types.SimpleNamespace:
    """Return what stands for a hook of accelerate: what it declares is all that is asked for."""
    return types.SimpleNamespace(**attributes)


def offloaded() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    module[1]._hf_hook = hook(offload=True, execution_device=0)
    return module


def test_an_offloaded_module_is_refused_for_that_and_not_for_meta() -> None:
    error = refusal(offloaded(), "cpu")

    assert "accelerate has offloaded its weights" in str(error)
    assert "load it without a device map" in str(error)
    assert error.path == "1"


def test_a_hook_among_several_is_found() -> None:
    module = nn.Linear(2, 2)
    module._hf_hook = hook(hooks=[hook(io_same_device=True), hook(offload=True)])

    assert "offloaded" in str(refusal(module))


@pytest.mark.parametrize(
    ("places", "named"),
    [({"0": 0, "1": "cpu"}, "0, cpu"), ({"0": 1, "1": 0}, "0, 1"), ({"": "disk"}, "disk")],
    ids=["two", "gpus", "disk"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in another"])
def test_a_dispatched_module_is_refused(places: dict[str, Any], named: str, inside: bool) -> None:
    module = nn.Linear(2, 2)
    module.hf_device_map = places

    error = refusal(nn.Sequential(nn.ReLU(), module) if inside else module)

    assert f"accelerate has dispatched it over {named}." in str(error)
    assert error.path == ("1" if inside else None)


@pytest.mark.parametrize("places", [None, {}, {"": "cpu"}], ids=str)
def test_a_module_that_was_loaded_onto_one_device_moves(places: Any) -> None:
    module = nn.Linear(2, 2)
    module.hf_device_map = places

    assert move(module, "meta").weight.device == META


# Quantized, sharded


@pytest.mark.parametrize(("flag", "bits"), [("8bit", "8-bit"), ("4bit", "4-bit")])
def test_a_quantized_module_is_refused(flag: str, bits: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    setattr(module[0], f"is_loaded_in_{flag}", True)

    error = refusal(module)

    assert f"it is quantized ({bits})" in str(error)
    assert "device_map={'': 'meta'}" in str(error)
    assert error.path == "0"
    assert move(module, "cpu") is module  # it is there


@pytest.mark.parametrize("name", ["FlatParameter", "ShardedTensor"])
def test_sharded_parameters_are_refused(name: str) -> None:
    module = nn.Linear(2, 2)
    module.weight = type(name, (nn.Parameter,), {})(torch.ones(2, 2))

    error = refusal(module)

    assert f"weight is sharded over several processes ({name})" in str(error)
    assert "Move the model before it is sharded" in str(error)
    assert error.path == "weight"


def test_a_module_sharded_by_fsdp_is_refused() -> None:
    module = nn.Sequential(type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2))

    assert "0 is sharded over several processes (FullySharded" in str(refusal(module))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")  # torch.distributed deprecates parts of itself
def test_distributed_tensors_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    module = nn.Linear(2, 2)
    weight = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Replicate()])
    module.weight = nn.Parameter(weight)

    error = refusal(module)

    assert "weight is sharded over several processes (DTensor)" in str(error)


# What is remembered


def test_a_module_that_has_moved_can_be_forgotten() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))  # has a class of its own
    gone = weakref.ref(module)

    move({"net": module}, "meta")
    del module
    gc.collect()

    assert gone() is None


# What the message says


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda module: module, "1"),
        (lambda module: {"nets": [module]}, "batch['nets'][0].1"),
    ],
    ids=["alone", "in a structure"],
)
def test_the_path_leads_to_the_part(wrap: Callable[[nn.Module], Any], path: str) -> None:
    with pytest.raises(MoveError, match="offloaded") as info:
        move(wrap(offloaded()), "cpu")

    assert info.value.path == path
    assert info.value.__cause__ is None


class Broken:
    """An object that cannot be sent."""

    def to(self, device: torch.device) -> Any:
        msg = "it is glued to the table"
        raise ValueError(msg)


class Moving(Dataset[str]):
    """A data set that moves what it gives, which belongs into the loop; gives what was said."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> str:
        try:
            move([self.x], "meta")
        except MoveError as error:
            return str(error)
        return "it could"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_worker_of_a_loader_the_message_says_so() -> None:
    (message,) = DataLoader(Moving(Broken()), num_workers=1, batch_size=None)

    assert "it is glued to the table." in message
    assert message.endswith("return CPU tensors from it, and call move() in the loop.")


def test_outside_of_a_worker_it_does_not() -> None:
    with pytest.raises(MoveError, match="glued to the table") as info:
        move([Broken()], "meta")

    assert "worker" not in str(info.value)
    assert isinstance(info.value.__cause__, ValueError)


# What stays behind


def test_strays_are_named_once_with_the_way_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module[1].mask = torch.ones(3)

    with pytest.warns(UserWarning, match=r"not 1\.mask \(cpu\): .*register_buffer") as caught:
        move(module, "meta")

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert module[1].mask.device == CPU


def test_what_the_norms_of_torch_compute_is_no_stray() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        modules = [nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2))]
    for module in modules:
        with torch.no_grad():
            module(torch.ones(1, 2))

        move(module, "meta")

        assert module.weight.device == META


# Optimizers


@pytest.mark.parametrize("where", ["cpu", torch.device("meta")], ids=str)
def test_an_optimizer_has_no_place_of_its_own(where: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())

    with pytest.raises(InvalidDeviceError, match=r"given\. Move the model .* move\(optimizer\)"):
        move(optimizer, where)


def test_an_optimizer_without_state_is_returned() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())

    assert move(optimizer) is optimizer
    assert not optimizer.state


def test_an_optimizer_follows_its_parameters_to_meta() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    move([optimizer, module], "meta")

    assert {s["exp_avg"].device for s in optimizer.state.values()} == {META}
    assert {s["step"].device for s in optimizer.state.values()} == {CPU}

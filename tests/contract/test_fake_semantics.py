"""What torch does on an accelerator, as far as devicekit builds on it.

Run on a fake machine, this file checks the fake; on a real one, it checks that the fake was right.
A difference is mended in fake_accelerator/, not here.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fake_accelerator.driver import Driver

SAME_DEVICE = "Expected all tensors to be on the same device"
# What torch says of layouts that it calls unfinished.
UNFINISHED = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_channel:UserWarning"),
]


def tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("steps", torch.arange(3))
    return model


# Tensors


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn),
        *(torch.int8, torch.uint8, torch.int64, torch.bool, torch.uint16),
    ],
    ids=str,
)
def test_a_round_trip_keeps_values_and_dtype(dtype: torch.dtype, dev: torch.device) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)

    there = x.to(dev)
    back = there.cpu()

    assert there.device == dev
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_a_tensor_goes_from_device_to_device(dev: torch.device, dev1: torch.device) -> None:
    x = torch.randn(3, 4)

    y = x.to(dev1).to(dev)

    assert y.device == dev
    assert torch.equal(y.cpu(), x)


def test_to_where_it_is_already_gives_the_same_tensor(dev: torch.device) -> None:
    x = torch.ones(3).to(dev)

    assert x.to(dev) is x
    assert x.to(dev, torch.float32) is x
    assert x.to(dev, copy=True) is not x


def test_a_device_without_index_is_the_current_one(dev: torch.device, dev1: torch.device) -> None:
    x = torch.ones(1, device=dev.type)

    assert x.device == dev
    assert x.device != torch.device(dev.type)
    assert torch.ones(1).to(dev1).to(dev.type).device == dev
    with torch.accelerator.device_index(dev1.index):
        assert torch.ones(1, device=dev.type).device == dev1


def test_the_current_device_is_of_the_thread(dev: torch.device, dev1: torch.device) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.accelerator.current_device_index())

    thread = threading.Thread(target=look)

    with torch.accelerator.device_index(dev1.index):
        thread.start()
        thread.join()

    assert seen == [dev.index]


@pytest.mark.parametrize(
    "make",
    [lambda where: torch.empty(1, device=where), lambda where: torch.ones(1).to(where)],
    ids=["empty", "to"],
)
def test_a_device_that_is_not_there(make: Callable[[str], torch.Tensor], dev: torch.device) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        make(f"{dev.type}:15")


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(4, 6)[:, ::2], id="strided"),
        pytest.param(torch.randn(3, 4).t(), id="transposed"),
        pytest.param(torch.ones(3).expand(2, 3), id="expanded"),
        pytest.param(torch.randn(3, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.empty(0, 3), id="empty"),
        pytest.param(torch.tensor(2.0), id="scalar"),
    ],
)
def test_every_kind_of_dense_tensor_arrives(x: torch.Tensor, dev: torch.device) -> None:
    assert torch.equal(x.to(dev).cpu(), x)


def test_memory_formats_are_kept(dev: torch.device) -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)

    assert x.to(dev).is_contiguous(memory_format=torch.channels_last)


def test_views_share_their_memory(dev: torch.device) -> None:
    x = torch.zeros(4, 4, device=dev)

    x[1] = 5
    x.t()[0, 2] = 7
    x.view(16)[15] = 9

    assert x.sum().item() == 36
    assert x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_numbers_and_texts_come_out_of_it(dev: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=dev)

    assert x.tolist() == [1, 2]
    assert x.sum().item() == 3
    assert str(dev) in repr(x)
    with pytest.raises(TypeError, match="to host memory first"):
        x.numpy()


def test_copies_and_pickles_stay_there(dev1: torch.device) -> None:
    x = torch.randn(3, device=dev1, requires_grad=True)

    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert y.device == dev1
        assert y.requires_grad
        assert torch.equal(y, x)


# Mixed devices


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda x, y: x + y, id="add"),
        pytest.param(lambda x, y: x.add_(y), id="inplace"),
        pytest.param(lambda x, y: torch.cat([x, y]), id="cat"),
        pytest.param(lambda x, y: x @ y, id="matmul"),
        pytest.param(torch.nn.functional.linear, id="linear"),
    ],
)
def test_tensors_of_two_devices_do_not_mix(
    work: Callable[[torch.Tensor, torch.Tensor], object], dev: torch.device, dev1: torch.device
) -> None:
    host, x, y = torch.ones(2, 2), torch.ones(2, 2, device=dev), torch.ones(2, 2, device=dev1)

    for left, right in [(host, x), (x, host), (x, y)]:
        with pytest.raises(RuntimeError, match=SAME_DEVICE):
            work(left, right)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        pytest.param(nn.Linear(3, 2), torch.ones(1, 3), id="linear"),
        pytest.param(nn.Embedding(3, 2), torch.tensor([1]), id="embedding"),
        pytest.param(nn.Conv1d(1, 1, 1), torch.ones(1, 1, 3), id="conv"),
        pytest.param(nn.LayerNorm(3), torch.ones(1, 3), id="norm"),
    ],
)
def test_a_layer_refuses_an_input_from_elsewhere(
    layer: nn.Module, x: torch.Tensor, dev: torch.device
) -> None:
    layer = copy.deepcopy(layer).to(dev)

    with pytest.raises(RuntimeError, match=f"{SAME_DEVICE}|should be the same"):
        layer(x)


def test_scalars_and_index_tensors_of_the_cpu_are_welcome(dev: torch.device) -> None:
    x = torch.ones(3, device=dev)

    x[torch.tensor([0, 1])] = 5

    assert (x + torch.tensor(2.0)).tolist() == [7, 7, 3]
    assert x[torch.tensor([2])].device == dev


def test_a_gradient_of_another_device_is_refused(dev: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2, device=dev))

    with pytest.raises(RuntimeError, match="attempting to assign a gradient with device type"):
        parameter.grad = torch.ones(2)


# Other layouts


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
class TestSparse:
    pytestmark = UNFINISHED

    def test_moves_with_all_its_parts(
        self, layout: torch.layout, dev: torch.device, dev1: torch.device
    ) -> None:
        x = torch.eye(3).to_sparse(layout=layout)

        there = x.to(dev1)
        elsewhere = there.to(dev)

        assert there.layout == layout
        assert there.values().device == dev1
        assert elsewhere.values().device == dev
        assert torch.equal(elsewhere.cpu().to_dense(), torch.eye(3))
        assert torch.equal(there.to_dense().cpu(), torch.eye(3))

    def test_stays_where_it_is(self, layout: torch.layout, dev: torch.device) -> None:
        x = torch.eye(3).to_sparse(layout=layout).to(dev)

        assert x.to(dev) is x


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
class TestNested:
    pytestmark = UNFINISHED

    def test_moves_with_all_its_parts(self, layout: torch.layout, dev1: torch.device) -> None:
        parts = [torch.randn(2, 2), torch.randn(3, 2)]
        x = torch.nested.nested_tensor(parts, layout=layout)

        there = x.to(dev1)

        assert there.device == dev1
        assert there.to(dev1) is there
        for part, want in zip(there.unbind(), parts, strict=True):
            assert part.device == dev1
            assert torch.equal(part.cpu(), want)


class TestQuantized:
    pytestmark = UNFINISHED

    def test_moves_with_its_scales(self, dev: torch.device, dev1: torch.device) -> None:
        x = torch.randn(2, 3)
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])

        for quantized in (
            torch.quantize_per_tensor(x, 0.1, 2, torch.qint8),
            torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
        ):
            there = quantized.to(dev1)

            assert there.device == dev1
            assert there.to(dev1) is there
            assert torch.equal(there.to(dev).cpu().dequantize(), quantized.dequantize())


def test_packed_sequences_keep_their_lengths_on_the_cpu(dev: torch.device) -> None:
    sequences = [torch.randn(3, 2), torch.randn(2, 2)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)

    there = packed.to(dev)
    outputs, _ = nn.LSTM(2, 3).to(dev)(there)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(outputs)

    assert there.data.device == dev
    assert there.batch_sizes.device.type == "cpu"
    assert there.to(dev) is there
    assert padded.device == dev
    assert lengths.tolist() == [3, 2]


# Modules and optimizers


@pytest.mark.inplace_move
def test_moving_a_module_keeps_its_parameters_and_ties(
    dev: torch.device, dev1: torch.device
) -> None:
    model = tied_model()
    weight = model[0].weight

    for where in (dev, dev1, torch.device("cpu")):
        model.to(where)

        assert model[0].weight is weight
        assert model[1].weight is weight
        assert weight.device == where
        assert model.steps.device == where


@pytest.mark.machine("plugin")
def test_a_plugin_gets_new_parameters_and_loses_the_ties(dev: torch.device) -> None:
    model = tied_model()
    weight = model[0].weight

    model.to(dev)

    assert model[0].weight is not weight
    assert model[0].weight is not model[1].weight
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = weight.data.to(dev)


@pytest.mark.inplace_move
def test_setting_the_data_moves_the_parameter_but_not_its_gradient(dev: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    parameter.data = parameter.data.to(dev)

    assert parameter.device == dev
    assert parameter.grad.device.type == "cpu"


def test_modules_can_be_swapped_in_place_everywhere(dev: torch.device) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(dev)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

    assert model.weight is weight
    assert weight.device == dev


def test_a_module_that_does_not_fit_is_left_in_two_places(
    dev: torch.device, driver: Driver
) -> None:
    driver.set_memory(dev.index, 4096)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(64, 64))

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        model.to(dev)

    assert {p.device.type for p in model.parameters()} == {"cpu", dev.type}


@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(lambda: nn.Linear(4, 3), torch.randn(2, 4), id="linear"),
        pytest.param(lambda: nn.Embedding(4, 3), torch.tensor([[1, 2]]), id="embedding"),
        pytest.param(lambda: nn.Conv2d(2, 4, 3, groups=2), torch.randn(2, 2, 6, 6), id="conv"),
        pytest.param(lambda: nn.ConvTranspose1d(2, 4, 3), torch.randn(2, 2, 6), id="transposed"),
        pytest.param(lambda: nn.BatchNorm1d(4), torch.randn(3, 4), id="norm"),
        pytest.param(lambda: nn.LSTM(4, 5, 2), torch.randn(3, 2, 4), id="lstm"),
        pytest.param(lambda: nn.GRU(4, 5, bidirectional=True), torch.randn(3, 2, 4), id="gru"),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
            torch.randn(2, 3, 8),
            id="transformer",
        ),
    ],
)
def test_a_layer_computes_what_it_computes_on_the_cpu(
    make: Callable[[], nn.Module], x: torch.Tensor, dev1: torch.device
) -> None:
    here = make()
    there = copy.deepcopy(here).to(dev1)

    results = []
    for layer, data in ((here, x), (there, x.to(dev1))):
        y = layer(data)
        results.append(y if torch.is_tensor(y) else y[0])
        results[-1].pow(2).sum().backward()

    assert torch.allclose(results[0], results[1].cpu(), atol=1e-5)
    for ours, want in zip(there.parameters(), here.parameters(), strict=True):
        assert ours.grad.device == dev1
        assert torch.allclose(ours.grad.cpu(), want.grad, atol=1e-4)


def test_gradients_flow_across_devices(dev: torch.device, dev1: torch.device) -> None:
    first, second = nn.Linear(4, 4).to(dev), nn.Linear(4, 2).to(dev1)

    second(first(torch.randn(2, 4, device=dev)).to(dev1)).sum().backward()

    assert first.weight.grad.device == dev
    assert second.weight.grad.device == dev1


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_training_gives_the_weights_of_the_cpu(name: str, dev: torch.device) -> None:
    models = [nn.Linear(4, 2)]
    models.append(copy.deepcopy(models[0]).to(dev))
    x = torch.randn(3, 4)

    for model in models:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(model.weight.device)).pow(2).sum().backward()
            optimizer.step()

    assert torch.allclose(models[0].weight, models[1].weight.cpu(), atol=1e-5)


@pytest.mark.parametrize(("capturable", "step"), [(False, "cpu"), (True, "device")])
def test_loaded_optimizer_state_goes_to_the_parameters(
    capturable: bool, step: str, dev: torch.device
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moved = nn.Linear(2, 2).to(dev)
    fresh = torch.optim.Adam(moved.parameters(), capturable=capturable)
    state = optimizer.state_dict()
    state["param_groups"][0]["capturable"] = capturable

    fresh.load_state_dict(state)

    loaded = fresh.state[moved.weight]
    assert loaded["exp_avg"].device == dev
    assert loaded["step"].device == (dev if step == "device" else torch.device("cpu"))


def test_modules_are_made_there(dev1: torch.device) -> None:
    with torch.device(dev1):
        model = nn.Linear(2, 2)
    from_meta = nn.Linear(2, 2, device="meta").to_empty(device=dev1)

    assert model.weight.device == dev1
    assert from_meta.weight.device == dev1


# Saving


def saved(obj: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return buffer


def test_saved_tensors_load_where_they_were_or_where_told(
    dev: torch.device, dev1: torch.device
) -> None:
    x = torch.arange(3.0, device=dev1)

    for where, want in [
        (None, dev1),
        ("cpu", torch.device("cpu")),
        (dev, dev),
        ({str(dev1): str(dev)}, dev),
    ]:
        y = torch.load(saved(x), map_location=where)

        assert y.device == want
        assert y.tolist() == [0, 1, 2]


def test_saved_tensors_load_mapped_from_a_file(dev1: torch.device, tmp_path: Path) -> None:
    torch.save(torch.arange(3.0), tmp_path / "x.pt")

    x = torch.load(tmp_path / "x.pt", map_location=dev1, mmap=True)

    assert x.device == dev1
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("left", [0, 1])
def test_a_saved_tensor_of_a_device_that_is_gone(
    left: int, dev1: torch.device, driver: Driver
) -> None:
    buffer = saved(torch.ones(3, device=dev1))
    driver.set_device_count(left)

    with pytest.raises(RuntimeError, match=r"[Aa]ttempting to deserialize object on"):
        torch.load(buffer)


# Memory


def test_memory_is_counted(dev: torch.device, driver: Driver) -> None:
    free, total = torch.accelerator.get_memory_info(dev)

    x = torch.empty(1 << 20, device=dev)

    assert torch.accelerator.get_memory_info(dev) == (free - x.nbytes, total)
    assert torch.accelerator.memory_allocated(dev) == x.nbytes
    del x
    assert driver.used(dev.index) == 0
    assert torch.accelerator.max_memory_allocated(dev) == 4 << 20


def test_new_memory_holds_garbage(dev: torch.device, driver: Driver) -> None:
    assert torch.empty(3, device=dev).cpu().isnan().all()
    assert driver.counters()["allocs"] == 1


def test_the_memory_of_others_counts(dev: torch.device, driver: Driver) -> None:
    driver.set_memory(dev.index, 1 << 20, others=1 << 19)

    with pytest.raises(torch.OutOfMemoryError, match="524288 are free"):
        torch.empty((1 << 19) + 1, dtype=torch.int8, device=dev)


@pytest.mark.parametrize(("at", "error_at"), [("allocation", 3), ("copy", 2)])
def test_a_failure_can_be_ordered(
    at: Literal["allocation", "copy"], error_at: int, dev: torch.device, driver: Driver
) -> None:
    def moves() -> bool:
        try:
            return torch.ones(3).to(dev).device == dev
        except torch.OutOfMemoryError:
            return False

    driver.fail_after(error_at, at, times=2)

    outcomes = [moves() for _ in range(5)]

    assert outcomes == [number not in (error_at, error_at + 1) for number in range(1, 6)]


def test_moving_twice_copies_once(dev: torch.device, driver: Driver) -> None:
    model = nn.Linear(2, 2)

    with driver.counting() as first:
        model.to(dev)
    with driver.counting() as second:
        model.to(dev)

    assert first["h2d"] == 2
    assert not any(second.values())


# Random numbers


def test_seeds(dev: torch.device) -> None:
    def draw() -> torch.Tensor:
        return torch.randn(4, device=dev)

    torch.manual_seed(3)
    host_state = torch.get_rng_state()
    first, second = draw(), draw()
    torch.manual_seed(3)

    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), host_state)


def test_generators_belong_to_a_device(dev: torch.device) -> None:
    generator = torch.Generator(device=dev)

    generator.manual_seed(1)
    first = torch.randn(3, device=dev, generator=generator)
    generator.manual_seed(1)

    assert torch.equal(torch.randn(3, device=dev, generator=generator), first)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(3, device=dev, generator=torch.Generator())


def test_the_state_of_the_generator_can_be_kept(dev1: torch.device) -> None:
    module = torch.get_device_module(dev1)
    state = module.get_rng_state(dev1)

    first = torch.randn(3, device=dev1)
    module.set_rng_state(state, dev1)

    assert torch.equal(torch.randn(3, device=dev1), first)


# What CUDA alone does


@pytest.fixture
def no_contexts(driver: Driver) -> Iterator[Driver]:
    driver.reset_contexts()
    yield driver
    driver.reset_contexts()


@pytest.mark.machine("cuda")
@pytest.mark.parametrize(
    ("ask", "contexts"),
    [
        pytest.param(torch.cuda.device_count, set(), id="count"),
        pytest.param(torch.cuda.is_available, set(), id="available"),
        pytest.param(lambda: torch.cuda.get_device_properties(1), set(), id="properties"),
        pytest.param(lambda: torch.cuda.mem_get_info(1), {1}, id="memory"),
        pytest.param(lambda: torch.accelerator.get_memory_info(1), {1}, id="memory_info"),
        pytest.param(lambda: torch.empty(1, device="cuda:1"), {1}, id="tensor"),
        pytest.param(lambda: torch.cuda.set_device(0), {0}, id="set_device"),
    ],
)
def test_what_makes_a_context(
    ask: Callable[[], object], contexts: set[int], no_contexts: Driver
) -> None:
    ask()

    assert no_contexts.contexts() == contexts


@pytest.mark.machine("cuda")
@pytest.mark.driver
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_cuda() -> None:
    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="cuda")
            message = "it could"
        except RuntimeError as error:
            message = str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)

    said = os.read(reader, 400).decode()
    os.close(reader)
    os.close(writer)

    assert "Cannot re-initialize CUDA in forked subprocess" in said


@pytest.mark.machine("cuda")
def test_the_names_of_cuda(dev1: torch.device) -> None:
    assert nn.Linear(2, 2).cuda(1).weight.device == dev1
    assert torch.ones(1).cuda().is_cuda
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.Linear(3, 3).cuda()(torch.randn(2, 3).cuda()).dtype == torch.bfloat16


# What others lack


def test_an_operator_can_be_missing(dev: torch.device, driver: Driver) -> None:
    x = torch.ones(2, 2, device=dev)
    driver.block_op("aten::_linalg_svd")

    with pytest.raises(NotImplementedError, match="Could not run 'aten::_linalg_svd"):
        torch.linalg.svd(x)


@pytest.mark.machine("mps")
def test_mps_has_one_device(dev: torch.device) -> None:
    assert torch.backends.mps.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.ones(2).to("mps").device == dev == torch.device("mps:0")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1).to("mps:1")


@pytest.mark.machine("mps")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_mps_has_no_float64(dtype: torch.dtype, dev: torch.device) -> None:
    with pytest.raises(TypeError, match="MPS framework doesn't support"):
        torch.ones(1, dtype=dtype).to(dev)
    assert torch.ones(1, dtype=dtype).to(dev, torch.complex64).device == dev


@pytest.mark.machine("mps", "xpu")
def test_modules_keep_their_parameters(dev: torch.device) -> None:
    model = tied_model()
    weight = model[0].weight

    model.to(dev)
    model(torch.randn(2, 3, device=dev)).sum().backward()

    assert model[0].weight is weight
    assert model[1].weight is weight
    assert weight.grad.device == dev


@pytest.mark.machine("xpu")
def test_xpu_is_found(dev: torch.device, dev1: torch.device) -> None:
    assert torch.xpu.is_available()
    assert torch.xpu.device_count() == 2
    assert torch.ones(2).to("xpu").device == dev
    assert torch.ones(2).to(dev).to(dev1).tolist() == [1, 1]

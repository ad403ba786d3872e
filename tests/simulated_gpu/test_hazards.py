"""The simulated GPU behaves as a real one may: code that does not wait gets wrong bytes."""

from __future__ import annotations

import contextlib
import importlib
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from children import exit_status
from torch import Tensor

import simulated_gpu

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(not simulated_gpu.is_on(), reason="needs a GPU that is simulated"),
]

DEVICE_TO_DEVICE, HOST_TO_DEVICE, DEVICE_TO_HOST = 3, 1, 2


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with simulated_gpu.policy("late"):
        torch.cuda.synchronize()
        yield
        simulated_gpu.synchronize()


def copy_on(stream: torch.cuda.Stream, to: Tensor, from_: Tensor, kind: int = DEVICE_TO_DEVICE) -> None:
    """Queue work on a stream that torch does not know about, as our kernels do."""
    from cupy.cuda import runtime

    runtime.memcpyAsync(to.data_ptr(), from_.data_ptr(), to.nbytes, kind, stream.cuda_stream)


def made_here_copied_beside(*, waits: bool) -> list[float]:
    side = torch.cuda.Stream()
    target = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    source = torch.arange(4, device="cuda") + 1.0
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    copy_on(side, target, source)
    side.synchronize()
    return target.tolist()


def test_another_stream_must_wait_for_what_torch_computes() -> None:
    assert made_here_copied_beside(waits=True) == [1.0, 2.0, 3.0, 4.0]
    assert made_here_copied_beside(waits=False) != [1.0, 2.0, 3.0, 4.0]


def changed_in_place_beside(*, waits: bool) -> list[float]:
    side = torch.cuda.Stream()
    values = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.mul_(5)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    result = (values + 1).tolist()
    torch.cuda.synchronize()  # before values is freed
    return result


def test_the_current_stream_must_wait_for_what_torch_computes_beside_it() -> None:
    assert changed_in_place_beside(waits=True) == [6.0, 6.0, 6.0]
    assert changed_in_place_beside(waits=False) == [2.0, 2.0, 2.0]


def freed_while_read(*, recorded: bool) -> list[float]:
    side = torch.cuda.Stream()
    target = torch.zeros(4, device="cuda")
    source = torch.full((4,), 7.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    copy_on(side, target, source)
    if recorded:
        source.record_stream(side)
    del source
    torch.cuda.current_stream().wait_stream(side)
    result = target.tolist()
    torch.cuda.synchronize()
    return result


def test_memory_that_another_stream_reads_must_be_recorded() -> None:
    assert freed_while_read(recorded=True) == [7.0] * 4
    assert freed_while_read(recorded=False) != [7.0] * 4
    with simulated_gpu.policy("ahead"):  # also where the current stream waits for nothing
        assert freed_while_read(recorded=True) == [7.0] * 4
        assert freed_while_read(recorded=False) != [7.0] * 4


def made_beside_read_here(*, recorded: bool) -> float:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        rows = torch.ones(4, device="cuda")
    here.wait_stream(side)
    total = rows.sum()
    if recorded:
        rows.record_stream(here)
    del rows
    return float(total)


@pytest.mark.parametrize("policy", ["eager", "late", "ahead", "random"])
def test_memory_of_another_stream_that_torch_reads_must_be_recorded(policy: str) -> None:
    with simulated_gpu.policy(policy):
        assert made_beside_read_here(recorded=True) == 4.0
        with pytest.raises(RuntimeError, match="freed while a stream that it was not made on may compute with it"):
            made_beside_read_here(recorded=False)


def test_who_has_waited_need_not_record() -> None:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    rows = torch.ones(4, device="cuda")
    side.wait_stream(here)
    with torch.cuda.stream(side):
        total = rows.sum()
    here.wait_stream(side)
    total.record_stream(here)
    del rows
    assert float(total) == 4.0
    rows = torch.ones(4, device="cuda")
    side.wait_stream(here)
    with torch.cuda.stream(side):
        total = rows.sum()
        assert float(total) == 4.0  # which waits for the stream
    del rows, total
    torch.cuda.synchronize()


def test_a_write_to_freed_memory_is_reported() -> None:
    side = torch.cuda.Stream()
    target, source = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    copy_on(side, target, source)
    del target
    with pytest.raises(RuntimeError, match="wrote to device memory after it was freed"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "CuPy"])
def test_the_host_must_wait_for_a_copy_to_it(by_torch: bool) -> None:
    near, far = torch.zeros(4).pin_memory(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    if by_torch:
        near.copy_(far, non_blocking=True)
    else:
        copy_on(torch.cuda.current_stream(), near, far, DEVICE_TO_HOST)
    done = torch.cuda.Event()
    done.record()
    assert near.tolist() == [0.0] * 4
    done.synchronize()
    assert near.tolist() == [1.0] * 4


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "CuPy"])
def test_a_pinned_buffer_must_not_be_filled_again_while_it_is_read(by_torch: bool) -> None:
    near, far = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    if by_torch:
        far.copy_(near, non_blocking=True)
    else:
        copy_on(torch.cuda.current_stream(), far, near, HOST_TO_DEVICE)
    near.fill_(2.0)
    assert far.tolist() == [2.0] * 4


def test_a_copy_from_pageable_memory_has_read_it_when_it_returns() -> None:
    near, far = torch.ones(4), torch.zeros(4, device="cuda")
    far.copy_(near, non_blocking=True)
    near.fill_(2.0)
    assert far.tolist() == [1.0] * 4


def test_pinned_memory_of_torch_outlives_its_copies() -> None:
    far = torch.zeros(4, device="cuda")
    far.copy_(torch.full((4,), 3.0).pin_memory(), non_blocking=True)
    torch.zeros(4).pin_memory()
    assert far.tolist() == [3.0] * 4


def test_memory_must_not_be_unregistered_while_it_is_copied() -> None:
    from cupy.cuda import runtime

    near = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.float32)
    far = torch.zeros(near.numel(), device="cuda")
    runtime.hostRegister(near.data_ptr(), near.nbytes, 0)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorHostMemoryAlreadyRegistered"):
        runtime.hostRegister(near.data_ptr(), near.nbytes, 0)
    copy_on(torch.cuda.current_stream(), far, near, HOST_TO_DEVICE)
    with pytest.raises(RuntimeError, match="unregistered while a copy of it was queued"):
        runtime.hostUnregister(near.data_ptr())
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorHostMemoryNotRegistered") as caught:
        runtime.hostUnregister(near.data_ptr())
    assert caught.value.status == 713


def test_random_moments_show_a_missing_wait_and_never_harm_a_right_program() -> None:
    def wrong(seed: int) -> bool:
        with simulated_gpu.policy("random", seed):
            return made_here_copied_beside(waits=False) != [1.0, 2.0, 3.0, 4.0]

    assert {wrong(seed) for seed in range(30)} == {True, False}
    for seed in range(30):
        with simulated_gpu.policy("random", seed):
            assert made_here_copied_beside(waits=True) == [1.0, 2.0, 3.0, 4.0]
            assert changed_in_place_beside(waits=True) == [6.0] * 3
            assert freed_while_read(recorded=True) == [7.0] * 4


def test_eager_streams_hide_a_missing_wait() -> None:
    with simulated_gpu.policy("eager"):
        assert made_here_copied_beside(waits=False) == [1.0, 2.0, 3.0, 4.0]


def test_an_event_that_is_asked_again_and_again_is_reached() -> None:
    torch.cuda._sleep(1)
    event = torch.cuda.Event()
    assert event.query()  # nothing was recorded
    event.record()
    assert not event.query()
    assert any(event.query() for _ in range(10))


def test_new_memory_holds_nothing_of_use() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert (torch.empty(3, dtype=torch.int64, device="cuda") < 0).all()


# ---- kernels


def gather(records: int, ids: Tensor, block: Tensor, **kwargs: object) -> None:
    from speedswap.kernels.cuda import shapes
    from speedswap.kernels.cuda.driver import launch_kernel

    width = block.shape[1] * 4
    columns = shapes.columns_argument([shapes.BlockPart(0, width, block.data_ptr(), width)], 4)
    arguments: list[Any] = [records, block.shape[1], ids.data_ptr(), len(ids), columns, 4, 0, 0]
    for position, value in kwargs.items():
        arguments[int(position.removeprefix("argument"))] = value
    launch_kernel(torch.device("cuda", 0), torch.cuda.current_stream(), "gather_w4", 1, 32, *arguments)


def test_a_kernel_runs_when_its_stream_comes_to_it() -> None:
    records = torch.arange(20, dtype=torch.float32, device="cuda").view(5, 4)
    block = torch.zeros(2, 4, device="cuda")
    gather(records.data_ptr(), torch.tensor([3, 0], device="cuda"), block)
    assert block.tolist() == [[12.0, 13.0, 14.0, 15.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_kernel_is_told_only_what_the_gpu_reaches() -> None:
    far, near = torch.zeros(5, 4, device="cuda"), torch.zeros(5, 4)
    block, ids = torch.zeros(1, 4, device="cuda"), torch.tensor([1], device="cuda")
    cases = [
        (near.data_ptr(), ids, block, "a record"),
        (far.data_ptr(), torch.tensor([10**9], device="cuda"), block, "a record"),
        (far.data_ptr(), torch.tensor([1]), block, "the ids"),
        (far.data_ptr(), ids, torch.zeros(1, 4), "a row of a block"),
    ]
    for records, some_ids, some_block, what in cases:
        gather(records, some_ids, some_block)
        with pytest.raises(RuntimeError, match=f"illegal memory access was encountered: {what}"):
            torch.cuda.synchronize()


def test_a_kernel_is_told_words_at_places_of_their_size() -> None:
    """A GPU requires aligned loads and stores, unlike the processor that runs this."""
    from speedswap.kernels.cuda.driver import launch_kernel
    from speedswap.kernels.cuda.shapes import CompactPart, compact_columns_argument

    memory = torch.zeros(64, dtype=torch.uint8, device="cuda")
    block, ids = torch.zeros(1, 4, device="cuda"), torch.tensor([1], device="cuda")
    gather(memory.data_ptr() + 2, ids, block)
    with pytest.raises(RuntimeError, match="misaligned records"):
        torch.cuda.synchronize()
    compact = [CompactPart(offset, block.data_ptr(), 4, None) for offset in (0, 1)]
    for name, part, wrong in (
        ("int8", 1, True),
        ("int8", 0, False),
        ("bfloat16_w2", 1, True),
        ("bfloat16_w2", 0, False),
    ):
        launch_kernel(
            block.device, torch.cuda.current_stream(), f"gather_{name}", 1, 32, memory.data_ptr(), 8,
            ids.data_ptr(), 1, compact_columns_argument([compact[part]]), 1, 0, 0,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="misaligned columns") if wrong else contextlib.nullcontext():
            torch.cuda.synchronize()


def test_a_forked_child_has_no_gpu() -> None:
    """CUDA does not follow a fork, neither into torch nor into CuPy."""
    from cupy.cuda import runtime

    block = torch.zeros(2, device="cuda")

    def child() -> None:
        refused = 0
        for use in (
            lambda: block + 1,
            lambda: torch.empty(1, device="cuda"),
            torch.cuda.Stream,
            torch.cuda.synchronize,
        ):
            try:
                use()
            except RuntimeError as error:
                refused += "forked subprocess" in str(error)
        try:
            runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            refused += error.status == 3
        assert refused == 5
        assert torch.cuda.is_available()  # so torch says, which has counted the devices before
        assert not torch.cuda.is_initialized()

    assert exit_status(child) == 0
    assert block.tolist() == [0, 0]


def test_a_kernel_is_given_its_own_number_of_arguments() -> None:
    """The driver would read addresses from whatever lies behind them."""
    from speedswap.kernels.cuda.driver import launch_kernel

    far = torch.zeros(5, device="cuda")
    given = torch.device("cuda", 0), torch.cuda.current_stream(), "count_keys_i64", 1, 32
    arguments = far.data_ptr(), 0, far.data_ptr()
    launch_kernel(*given, *arguments)
    for wrong in (arguments[:2], (*arguments, 0)):
        with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
            launch_kernel(*given, *wrong)
    with pytest.raises(TypeError):
        launch_kernel(*given, *arguments[:2], far)  # type: ignore[arg-type]


def test_structures_are_as_long_as_those_of_the_kernels() -> None:
    from speedswap.kernels.cuda import driver, shapes

    for name, position, structure in (
        ("gather_w4", 4, shapes.columns_argument([], 4)),
        ("gather_int8", 4, shapes.compact_columns_argument([])),
        ("find_places", 2, shapes.batches_argument([])),
        ("pool_float32", 0, bytes(8 * len(shapes.BAGS))),
    ):
        assert driver.load().module.get_function(name).kernel.sizes[position] == len(structure), name


# ---- what the host waits for


def test_round_trips_are_counted_with_their_places() -> None:
    values = torch.arange(6.0, device="cuda")
    mask = values > 2
    with simulated_gpu.counted() as counts:
        doubled = values * 2
        assert not counts.round_trips
        doubled.sum().item()
        doubled.cpu()
        values[mask]
        torch.unique(values)
        torch.repeat_interleave(values, torch.ones(6, dtype=torch.int64, device="cuda"))
        torch.equal(values, doubled)
        torch.cuda.synchronize()
    kinds = [trip.what for trip in counts.round_trips]
    assert kinds[:3] == ["_local_scalar_dense", "copy to the host", "nonzero"]
    assert kinds[-2:] == ["equal", "synchronize the device"]
    assert {"_unique2", "repeat_interleave"} <= set(kinds)
    assert [trip for trip in counts.round_trips if __file__ not in trip.where] == []


def test_allocations_are_counted() -> None:
    values = torch.zeros(1000, device="cuda")
    with simulated_gpu.counted() as counts:
        values.add_(1)
        values.view(10, 100)[3].mul_(2)
    assert (counts.allocations, counts.bytes_allocated) == (0, 0)
    with simulated_gpu.counted() as counts:
        torch.empty(1000, device="cuda")
    assert (counts.allocations, counts.bytes_allocated) == (1, 4000)


def test_sync_debug_mode_finds_what_waits() -> None:
    values = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        values += 1
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            values.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_there_is_only_so_much_memory() -> None:
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(free + 1, dtype=torch.uint8, device="cuda")
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory


def test_a_process_may_have_a_share_of_the_memory() -> None:
    _, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(2**21, dtype=torch.uint8, device="cuda")
        torch.empty(2**19, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(2**21, dtype=torch.uint8, device="cuda")


# ---- torch on it


def test_a_tensor_of_the_cpu_is_not_taken_for_one_of_the_gpu() -> None:
    far = torch.ones(3, device="cuda")
    assert (far + torch.tensor(1.0)).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        far + torch.ones(3)
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(3)[torch.tensor([0], device="cuda")]
    with pytest.raises(TypeError, match="can't convert cuda"):
        far.numpy()


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad], ids=lambda o: o.__name__
)
@pytest.mark.parametrize("policy", ["eager", "late", "ahead", "random"])
def test_training_gives_the_bits_of_the_cpu(policy: str, optimizer: type[torch.optim.Optimizer]) -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
        model = torch.nn.Sequential(*layers)
        batches = torch.randn(4, 5, 4)
        model.to(device)
        steps = optimizer(model.parameters(), lr=0.1, foreach=False)  # type: ignore[call-arg]
        for batch in batches.to(device):
            steps.zero_grad()
            model(batch).square().sum().backward()
            steps.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with simulated_gpu.policy(policy, 5):
        far = trained("cuda")
    for ours, theirs in zip(far, trained("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_device_has_random_numbers_of_its_own() -> None:
    """Seeding, saving and drawing on one device leave the other's unchanged."""

    def draws() -> list[Tensor]:
        values = [torch.randn(3, device="cuda"), torch.rand(2, device="cuda").bernoulli_(0.5)]
        values += [torch.nn.functional.dropout(torch.ones(8, device="cuda")), torch.randperm(5, device="cuda")]
        return [value.cpu() for value in values]

    torch.manual_seed(3)
    cpu, far = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = draws()
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.cuda.get_rng_state(), far)
    torch.randn(4)
    torch.cuda.set_rng_state(far)
    assert all(map(torch.equal, draws(), first))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        assert not torch.equal(draws()[0], first[0])
        torch.manual_seed(3)  # the GPU's generator too, which this fork does not restore
    assert all(map(torch.equal, draws(), first))
    torch.cuda.manual_seed_all(4)
    other = draws()
    torch.cuda.manual_seed(4)
    assert all(map(torch.equal, draws(), other))
    assert not torch.equal(other[0], first[0])


def test_a_generator_belongs_to_its_device() -> None:
    far, near = torch.Generator("cuda").manual_seed(1), torch.Generator().manual_seed(1)
    assert far.device == torch.device("cuda", 0)
    before = torch.cuda.get_rng_state()
    values = torch.randn(3, device="cuda", generator=far)
    assert not torch.equal(torch.randn(3, device="cuda", generator=far), values)
    assert torch.equal(torch.randn(3, device="cuda", generator=far.manual_seed(1)), values)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(3, device="cuda", generator=near)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.randn(3, generator=far)


def test_the_simulation_fails_where_it_has_nothing() -> None:
    """It never pretends."""
    with pytest.raises((AttributeError, RuntimeError, NotImplementedError)):
        torch.cuda.CUDAGraph()
    with pytest.raises((AttributeError, RuntimeError, AssertionError)):
        torch.cuda.memory_snapshot()
    with pytest.raises((AttributeError, RuntimeError, AssertionError)):
        torch.cuda.get_per_process_memory_fraction()
    with pytest.raises(NotImplementedError, match="the simulated GPU has no events between processes"):
        torch.cuda.Event(interprocess=True)
    with pytest.raises(AttributeError):
        importlib.import_module("cupy").zeros(3)


def test_views_resizes_and_outputs_keep_their_memory() -> None:
    base = torch.zeros(2, 3, device="cuda")
    view = base.t()[1]
    view += 4
    assert base.tolist() == [[0.0, 4.0, 0.0], [0.0, 4.0, 0.0]]
    out = torch.empty(0, device="cuda")
    assert torch.add(base, 1, out=out) is out
    assert out.tolist() == [[1.0, 5.0, 1.0], [1.0, 5.0, 1.0]]
    assert base.view(torch.int32).dtype == torch.int32
    assert base.diagonal().data_ptr() == base.data_ptr()
    parameter = torch.nn.Parameter(torch.zeros(1, 3, device="cuda"))
    parameter.data = base
    assert parameter.shape == (2, 3)
    assert parameter.data_ptr() == base.data_ptr()

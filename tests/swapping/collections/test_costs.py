"""The costs of a step do not depend on the number of tables: launches, waits and allocations; calls of Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
import simulated_gpu
import torch
from torch import Tensor

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, kernels
from speedswap.kernels.ids import find_all
from speedswap.swapping.lookup import pool

ROWS, LOOKUPS = 20, 240
# They launch nothing, or are parts of others.
VIEWS = """
    view as_strided reshape _reshape_alias slice select unsqueeze expand detach alias transpose t unbind split narrow to
    squeeze split_with_sizes lift_fresh result_type item is_nonzero resolve_conj resolve_neg _local_scalar_dense empty
    empty_strided empty_like new_empty promote_types
"""
NO_LAUNCH = {f"aten::{name}" for name in VIEWS.split()}


def launches_kernels(name: str) -> bool:
    """Return whether an event of torch's profiler may be a launch."""
    return name.startswith("aten::") and name not in NO_LAUNCH


def is_called(event: Any) -> bool:
    """Return whether an event of torch's profiler is an operation that is not part of another."""
    while (event := event.cpu_parent) is not None:
        if event.name.startswith("aten::"):
            return False
    return True


class Costs(NamedTuple):
    """The costs of one step: launches of the package's kernels, and of torch's by name."""

    launches: int
    operations: Counter[str]
    round_trips: int
    allocations: int


@contextmanager
def counted(which: Callable[[Any], bool] = lambda event: True) -> Iterator[Callable[[], Costs]]:
    """Count until the block's end, of torch's operations some; the function returns the costs then."""
    gc.collect()
    kernels.finish_transfers()  # of an earlier test, whose threads would be counted
    gc.disable()
    try:
        with simulated_gpu.counted() as counts, torch.autograd.profiler.profile() as profiled:
            yield lambda: Costs(
                counts.launches,
                Counter(each.name for each in profiled.function_events if launches_kernels(each.name) and which(each)),
                len(counts.round_trips),
                counts.allocations,
            )
            kernels.finish_transfers()
    finally:
        gc.enable()


def collection_of(
    kind: str,
    num_tables: int,
    device: str,
    dims: tuple[int, ...] = (4,),
    poolings: tuple[str, ...] = ("sum", "mean", "max"),
    padding_idx: int | None = 0,
) -> Any:
    settings = {"storage": "pinned" if device == "cuda" else "pageable", "device": device}
    named = [
        {
            "name": f"t{i}",
            "num_embeddings": ROWS,
            "embedding_dim": dims[i % len(dims)],
            "padding_idx": padding_idx if i % 2 else None,
        }
        for i in range(num_tables)
    ]
    if kind == "rows":
        return speedswap.EmbeddingCollection([EmbeddingConfig(**each) for each in named], **settings)
    configs = [EmbeddingBagConfig(**each, pooling=poolings[i % len(poolings)]) for i, each in enumerate(named)]
    return speedswap.EmbeddingBagCollection(configs, **settings)


def one(num_tables: int, seed: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(ROWS, (num_tables, LOOKUPS // num_tables), generator=generator).to(device)
    return {f"t{i}": ids for i, ids in enumerate(drawn)}


def pairs(num_tables: int, seed: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    given = one(num_tables, seed, device)
    return {name: (ids, torch.arange(0, len(ids), 2, device=device)) for name, ids in given.items()}


def keyed(num_tables: int, seed: int, device: str) -> KeyedJaggedTensor:
    given = pairs(num_tables, seed, device)
    offsets = torch.arange(0, LOOKUPS + 1, 2, device=device)
    return KeyedJaggedTensor.from_offsets_sync(list(given), torch.cat([ids for ids, _ in given.values()]), offsets)


FORMS: dict[str, Callable[[int, int, str], Any]] = {
    "one": one,
    "narrow": lambda *args: {name: ids.int() for name, ids in one(*args).items()},
    "pairs": pairs,
    "keyed": keyed,
    "otherwise": lambda *args: keyed(*args).permute([1, 0, *range(2, args[0])]),
}


def step(collection: Any, optimizer: torch.optim.Optimizer, features: Any) -> None:
    optimizer.zero_grad()
    found = collection(features)
    if isinstance(found, dict):
        torch.cat([each.values().reshape(-1) for each in found.values()]).sum().backward()
    else:
        found.values().sum().backward()
    optimizer.step()


CASES = [("bags", form, False) for form in FORMS] + [("rows", "one", False), ("rows", "keyed", False)]
CASES += [("bags", "one", True), ("bags", "keyed", True)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "form", "ahead"), CASES, ids=str)
def test_a_step_costs_the_same_for_any_number_of_tables(kind: str, form: str, ahead: bool, gpu: str) -> None:
    """Two widths, padding in half of the tables, and sums, means and maxima among the bags."""
    costs = []
    for num_tables in (12, 60):
        collection = collection_of(kind, num_tables, gpu, dims=(4, 6))
        optimizer = torch.optim.Adam(collection.parameters(), lr=0.1, foreach=True)
        batches = [FORMS[form](num_tables, seed, gpu) for seed in range(8)]
        loop = iter(speedswap.lookahead(batches, {collection: lambda features: features}) if ahead else batches)
        for _ in range(4):
            step(collection, optimizer, next(loop))
            kernels.finish_transfers()  # so that no thread's timing decides how many writes are still pending
        with counted() as so_far:
            for _ in range(2):
                step(collection, optimizer, next(loop))
                kernels.finish_transfers()
        costs.append(so_far())
        assert len([*loop]) == 2  # writes of a loop that is left would arrive while the next case is counted
    few, many = costs
    assert few.round_trips == many.round_trips > 0 < few.launches
    assert few.operations == many.operations
    assert few == many


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_take_one_launch_and_their_gradients_three(mode: str, gpu: str) -> None:
    """Of any number of features; that of the weights takes one more."""
    _, local = kernels.unique(torch.arange(LOOKUPS, device=gpu) % ROWS)
    weight = torch.randn(ROWS, 4, device=gpu, requires_grad=True)
    factors = torch.rand(LOOKUPS, device=gpu, requires_grad=True) if mode == "weighted" else None
    offsets = torch.arange(0, LOOKUPS + 1, 2, device=gpu)
    with counted() as forward:
        pooled = pool(weight, local, offsets, "sum" if factors is not None else mode, factors, features=12)
    grad = torch.randn_like(pooled)
    with counted() as backward:
        torch.autograd.grad(pooled, (weight,) if factors is None else (weight, factors), grad)
    assert (forward().launches, dict(forward().operations)) == (1, {})
    assert (backward().launches, dict(backward().operations)) == (3 + (mode == "weighted"), {})


@pytest.mark.parametrize("ahead", [False, True])
def test_the_sort_that_finds_rows_orders_their_gradients(
    ahead: bool, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sort, sorts = torch.sort, []
    monkeypatch.setattr(torch, "sort", lambda *args, **kwargs: sorts.append(1) or sort(*args, **kwargs))
    collection = collection_of("bags", 1, gpu)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    batches = [one(1, seed, gpu) for seed in range(6)]
    loop = iter(speedswap.lookahead(batches, {collection: lambda features: features}) if ahead else batches)
    for features in loop:
        step(collection, optimizer, features)
    kernels.finish_transfers()
    assert len(sorts) == len(batches)


@pytest.mark.parametrize("kind", ["sum and mean", "sum and max", "rows"])
@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_once_for_any_number_of_stores(form: str, kind: str, gpu: str) -> None:
    """For the number of rows, and whether ids and offsets are right; of several stores, before any rows are read."""
    if kind == "rows" and form not in ("one", "keyed"):
        pytest.skip("features of rows are read as those of bags")
    for dims in ((4,), (4, 6)):
        poolings = tuple(kind.split(" and "))
        collection = collection_of("rows" if kind == "rows" else "bags", 6, gpu, dims, poolings)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
        batches = [FORMS[form](6, seed, gpu) for seed in range(3)]
        for features in batches[:2]:
            step(collection, optimizer, features)
        with simulated_gpu.counted() as counts:
            step(collection, optimizer, batches[2])
        assert len(counts.round_trips) == 1, counts.round_trips


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_ids_announced_on_the_cpu_are_compared_with_those_on_the_gpu_in_one_wait(kind: str, gpu: str) -> None:
    """Nothing but their values tells that they are the same."""
    collection = collection_of(kind, 6, gpu)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    loop = iter(speedswap.lookahead([one(6, seed, "cpu") for seed in range(6)], {collection: lambda given: given}))
    for _ in range(3):
        step(collection, optimizer, {name: ids.to(gpu) for name, ids in next(loop).items()})
        kernels.finish_transfers()
    features = {name: ids.to(gpu, non_blocking=True) for name, ids in next(loop).items()}
    kernels.finish_transfers()
    with simulated_gpu.counted() as counts:
        step(collection, optimizer, features)
        kernels.finish_transfers()
    assert len(counts.round_trips) == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("num_tables", [10, 100])
def test_a_step_has_few_launches(num_tables: int, ahead: bool, gpu: str) -> None:
    """Of torch's operations each counts as one, in the main thread and backward, on the host too."""
    collection = collection_of("bags", num_tables, gpu, poolings=("sum",), padding_idx=None)
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.1, fused=True)
    batches = [one(num_tables, seed, gpu) for seed in range(8)]
    with simulated_gpu.policy("eager"):  # under which the simulation itself calls no operations of torch
        loop = iter(speedswap.lookahead(batches, {collection: lambda features: features}) if ahead else batches)
        for _ in range(5):
            step(collection, optimizer, next(loop))
            kernels.finish_transfers()
        with counted(is_called) as so_far:
            step(collection, optimizer, next(loop))
            kernels.finish_transfers()
    costs = so_far()
    assert costs.round_trips == 1
    assert costs.launches <= 10 + 2 * ahead
    del costs.operations["aten::_has_compatible_shallow_copy_type"]  # compares two types when memory is assigned
    assert costs.operations.total() <= 8, costs.operations


def test_idle_rows_add_one_launch_to_a_step(gpu: str) -> None:
    """Their kernel, and no wait while the optimizer counts its steps on the host."""
    costs = {}
    for idle_rows in ("lazy", "dense"):
        collection = collection_of("bags", 10, gpu, poolings=("sum",), padding_idx=None)
        optimizer = torch.optim.AdamW(collection.parameters(), lr=0.1, foreach=True)
        speedswap.attach(optimizer, collection, idle_rows=idle_rows)
        batches = [one(10, seed, gpu) for seed in range(6)]
        with simulated_gpu.policy("eager"):
            for features in batches[:-1]:
                step(collection, optimizer, features)
            with counted(is_called) as so_far:
                step(collection, optimizer, batches[-1])
        costs[idle_rows] = so_far()
    lazy, dense = costs["lazy"], costs["dense"]
    assert dense.launches == lazy.launches + 1
    assert dense.round_trips == lazy.round_trips


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_reading_a_keyed_batch_takes_no_python_for_each_key(kind: str) -> None:
    """The calls of functions in a forward pass with 20 keys and with 200; a dictionary of results is made of calls."""
    calls = []
    for num_tables in (20, 200):
        collection = collection_of(kind, num_tables, "cpu")
        features = (
            keyed(num_tables, 0, "cpu")
            if num_tables == 20
            else KeyedJaggedTensor.from_lengths_sync(
                [f"t{i}" for i in range(num_tables)], torch.zeros(400, dtype=torch.int64), torch.full((num_tables,), 2)
            )
        )
        with torch.no_grad():
            collection(features)
            calls.append(calls_of(lambda collection=collection, features=features: collection(features)))
    results = 0 if kind == "bags" else 180 * 2  # of JaggedTensor and its base class
    assert calls[1] - calls[0] <= results


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions, of Python or C, are called."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_batches_of_many_sizes_leave_no_memory_behind() -> None:
    """Of the offsets of bags of one size, large ones are kept only until those of the next size come."""
    collection = collection_of("bags", 3, "cpu")
    seen = []
    for width in range(1, 5):
        ids = torch.ones(8000, width, dtype=torch.int64)
        seen.append(weakref.ref(collection._given({f"t{i}": ids for i in range(3)}).offsets))
    assert [each() is None for each in seen] == [True, True, True, False]


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_step_takes_no_new_memory_from_the_system(ahead: bool, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered, and torch's allocators, which keep memory, are asked for as much as in the step before."""
    from cupy.cuda import runtime

    pinned, registered, empty, register = list[int](), list[int](), torch.empty, runtime.hostRegister

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if kwargs.get("pin_memory"):
            pinned.append(made.nbytes)
        return made

    collection = collection_of("bags", 10, gpu, poolings=("sum",), padding_idx=None)
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.1, fused=True)
    first = one(10, 0, gpu)
    batches = [{name: (ids + k) % ROWS for name, ids in first.items()} for k in range(10)]
    steps = []
    with simulated_gpu.policy("eager"):
        loop = iter(speedswap.lookahead(batches, {collection: lambda features: features}) if ahead else batches)
        for k in range(8):
            if k == 5:
                monkeypatch.setattr(torch, "empty", noted)
                monkeypatch.setattr(runtime, "hostRegister", lambda *args: registered.append(1) or register(*args))
            pinned.clear()
            torch.cuda.reset_peak_memory_stats()
            with counted() as so_far:
                step(collection, optimizer, next(loop))
                kernels.finish_transfers()
            if k >= 5:
                peak = None if ahead else torch.cuda.max_memory_allocated()  # a thread's timing decides it otherwise
                steps.append((so_far().allocations, sorted(pinned), torch.cuda.memory_allocated(), peak))
    assert steps == [steps[0]] * 3
    assert registered == []
    allocations, pinned_bytes, *_ = steps[0]
    assert allocations <= 20 + 2 * ahead
    assert len(pinned_bytes) <= 1 + ahead
    assert sum(pinned_bytes) < 4096


def peak_bytes(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the most device memory that a call holds beyond what was held before, and its result."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    return torch.cuda.max_memory_allocated() - before, result


@pytest.mark.parametrize("lookups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_finding_rows_holds_at_most_thirteen_bytes_per_id_besides_its_result(
    dtype: torch.dtype, lookups: int, gpu: str
) -> None:
    """Without what torch's sort takes while it runs: 4 for the sorted id, 8 for its row, and half a byte to count."""
    count, rows = 60_000, 1000
    given = [torch.randint(rows, (count // lookups,), dtype=dtype, device=gpu) for _ in range(lookups)]
    with simulated_gpu.policy("eager"):
        find_all([(ids, rows) for ids in given])
        peak, found = peak_bytes(lambda: find_all([(ids, rows) for ids in given]))
    returned = sum(each.nbytes for rows, local in found for each in (rows, local, kernels.order_of(local)))
    assert returned >= 16 * count
    assert peak - returned <= 13 * count


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_bags_hold_no_more_memory_than_their_results_and_sums_of_chunks(mode: str, gpu: str) -> None:
    count, width, rows = 60_000, 4, 1000
    with simulated_gpu.policy("eager"):
        _, local = kernels.unique(torch.arange(count, device=gpu) % rows)
        weight = torch.randn(rows, width, device=gpu, requires_grad=True)
        offsets = torch.arange(0, count + 1, 2, device=gpu)
        peak, pooled = peak_bytes(lambda: pool(weight, local, offsets, mode))
        kept = 8 * count + (8 * pooled.numel() if mode == "max" else 0)  # places, and the winners, for the gradient
        assert peak <= pooled.nbytes + kept + 1024
        grad = torch.ones_like(pooled)
        peak, (found,) = peak_bytes(lambda: torch.autograd.grad(pooled, (weight,), grad))
    assert peak <= found.nbytes + 8 * rows + 2 * 4 * width * (count // 64 + 1) + 1024

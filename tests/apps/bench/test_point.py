"""No broken store is timed: any wrong gather or scatter is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from speedswap.apps.bench.measure import IdBatch
from speedswap.apps.bench.transfer import DIRECTIONS, RowBuffers, Store, measure, ours, peer_makers, verify
from speedswap.apps.errors import WrongResultError

STORAGES = ("device", "pinned", "pageable", "disk")


@pytest.fixture
def rows():
    return torch.rand(50, 4)


@pytest.fixture
def batches(device):
    ids = torch.randperm(50)
    return [IdBatch(part, part.to(device)) for part in ids[:20].split(5)]


@pytest.fixture
def buffers(device):
    return RowBuffers.of(5, 4, device)


def plain(rows: torch.Tensor, buffers: RowBuffers) -> Store:
    """Make a store that is right."""
    table = rows.to(buffers.out.device, copy=True)

    def scatter(batch: IdBatch) -> None:
        table[batch.near] = buffers.values

    return Store("plain", "device", table, lambda batch: table[batch.near], scatter)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.filterwarnings("ignore:SW405")
def test_our_stores_are_right(storage, rows, buffers, batches, tmp_path):
    store = ours(storage, rows, buffers, tmp_path)
    verify([store], rows, batches, buffers)
    assert torch.equal(store.memory[batches[0].host].cpu(), buffers.values.cpu())
    store.close()


def test_every_peer_of_the_cpu_is_right(rows, tmp_path):
    batches = [IdBatch(part, part) for part in torch.randperm(50)[:20].split(5)]
    buffers = RowBuffers.of(5, 4, "cpu")
    makers = [maker for some in peer_makers("cpu").values() for maker in some.values()]
    verify([maker(rows.clone(), buffers, tmp_path) for maker in makers], rows, batches, buffers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torchs_ways_to_a_gpu_are_right(rows, tmp_path):
    batches = [IdBatch(part, part.cuda()) for part in torch.randperm(50)[:20].split(5)]
    buffers = RowBuffers.of(5, 4, "cuda")
    makers = peer_makers("cuda")["torch"].values()
    verify([maker(rows.pin_memory(), buffers, tmp_path) for maker in makers], rows, batches, buffers)


def test_stores_over_the_same_rows_are_verified_together(rows, buffers, batches):
    """Peers index the rows themselves: what one store scattered must not fail the next."""
    first = plain(rows, buffers)
    verify([first, dataclasses.replace(first, package="again")], rows, batches, buffers)


def test_a_gather_of_other_rows_is_found(rows, buffers, batches):
    wrong = dataclasses.replace(plain(rows, buffers), gather=lambda batch: rows[batch.host.flip(0)])
    with pytest.raises(WrongResultError, match=f"plain, device gathers row {int(batches[0].host[0])} as "):
        verify([wrong], rows, batches, buffers)


def test_a_gather_that_leaves_a_row_out_is_found(rows, buffers, batches):
    """The result of an earlier gather in ``out`` must not pass for this one's."""
    right = plain(rows, buffers)

    def gather(batch: IdBatch) -> torch.Tensor:
        buffers.out[:-1] = right.memory[batch.near[:-1]]
        return buffers.out

    buffers.out.copy_(rows[batches[0].host])
    with pytest.raises(WrongResultError, match=f"gathers row {int(batches[0].host[-1])} as "):
        verify([dataclasses.replace(right, gather=gather)], rows, batches, buffers)


def test_a_scatter_that_does_nothing_is_found(rows, buffers, batches):
    wrong = dataclasses.replace(plain(rows, buffers), scatter=lambda batch: None)
    with pytest.raises(WrongResultError, match="plain, device scatters row"):
        verify([wrong], rows, batches, buffers)


def test_a_scatter_that_was_done_before_does_not_pass_again(rows, buffers, batches):
    """Two stores over one memory: the second one does nothing, and finds the first one's rows in place."""
    first = plain(rows, buffers)
    with pytest.raises(WrongResultError, match="idle, device scatters row"):
        verify([first, dataclasses.replace(first, package="idle", scatter=lambda batch: None)], rows, batches, buffers)


def test_a_scatter_to_other_rows_as_well_is_found(rows, buffers, batches):
    right = plain(rows, buffers)

    def scatter(batch: IdBatch) -> None:
        right.memory[batch.near] = buffers.values
        right.memory[batches[1].host[2]] = 0

    with pytest.raises(WrongResultError, match=rf"scatters row {int(batches[1].host[2])} as "):
        verify([dataclasses.replace(right, scatter=scatter)], rows, batches, buffers)


def test_a_result_of_another_shape_is_found(rows, buffers, batches):
    wrong = dataclasses.replace(plain(rows, buffers), gather=lambda batch: rows[batch.host[:3]])
    with pytest.raises(WrongResultError, match=r"shape \(3, 4\)"):
        verify([wrong], rows, batches, buffers)


def test_nothing_wrong_is_timed(rows, buffers, batches):
    calls = []
    wrong = dataclasses.replace(plain(rows, buffers), scatter=calls.append)
    with pytest.raises(WrongResultError):
        measure([wrong], {}, rows, batches, buffers, repeats=1)
    assert len(calls) == 1


def test_a_point_has_every_figure(rows, buffers, batches):
    """Rates and shares follow from the seconds."""
    mine = dataclasses.replace(plain(rows, buffers), package="speedswap", storage="pageable")
    floor = {way: lambda call: sum(range(1000)) for way in DIRECTIONS}
    found = measure([mine, plain(rows, buffers)], {"host": floor}, rows, batches, buffers, repeats=3)
    assert (found["table_rows"], found["row_bytes"], found["batch_rows"], found["payload_bytes"]) == (50, 16, 5, 80)
    for way in DIRECTIONS:
        took = {name: store[way]["seconds"] for name, store in found["stores"].items()}
        assert min(took.values()) > 0
        ours = found["stores"]["speedswap, pageable"][way]
        assert ours["gb_per_second"] == pytest.approx(80 / ours["seconds"] / 1e9)
        assert ours["achieved_over_floor"] == pytest.approx(found["floors"]["host"][way]["seconds"] / ours["seconds"])

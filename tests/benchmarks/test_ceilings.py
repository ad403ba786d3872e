"""The limits of a machine and how close the engines come: on the CPU, and on a GPU or the simulated one."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_ceilings import ceilings_figure, main
from machine import ceilings, ways
from machine.link import Batch, Link

from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import BenchmarkError, WrongResultError

pytestmark = pytest.mark.release

MIB = 1 << 20
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = ceilings.Plan((4 * MIB, 8 * MIB, 2**60), (64, 512), (512,), MIB // 4, (MIB // 4,), (1, 0), MIB, 2, 600.0)


def test_every_part_is_measured(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ceilings.Plan, "of", lambda device, quick: SMALL)
    path = tmp_path / "ceilings.json"
    plot = tmp_path / "ceilings.png"
    drawn = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    assert main(["--device", device, "--json", str(path), *drawn]) == 0
    assert not drawn or plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(path.read_text())
    assert written["benchmark"] == f"ceilings-{device}"
    found = written["results"]
    assert found["left_out"] == ["a table of 1073741824 GiB: not so much memory is free"]
    pages = {(entry["huge_pages"], entry["faulted_in_before"]) for entry in found["registration"]}
    assert pages == {(huge, faulted) for huge in (False, True) for faulted in (True, device == "cpu")}
    assert ["register" in entry["seconds"] for entry in found["registration"]] == [device == "cuda"] * len(pages)
    assert {entry["threads"] for entry in found["memory"]} >= {1, torch.get_num_threads()}
    assert min(entry[what] for entry in found["memory"] for what in ("read", "written", "copied")) > 0
    assert {entry["threads"] for entry in found["cpu"]} >= {1, torch.get_num_threads()}
    assert min(entry[what] for entry in found["cpu"] for what in ("gather", "scatter")) > 0
    if device == "cpu":
        assert "rows" not in found
        return
    assert found["multiprocessors"][0]["multiprocessors"] == 1
    assert min(entry["rows"][way] for entry in found["multiprocessors"] for way in (*DIRECTIONS, "both_each")) > 0
    assert {entry["rows"]["footprint_bytes"] for entry in found["multiprocessors"]} == {8 * MIB}
    sizes = [(point["footprint_bytes"], point["row_bytes"]) for point in found["rows"]]
    assert sizes == [(4 * MIB, 512), (8 * MIB, 512), (8 * MIB, 64)]
    for point in found["rows"]:
        for direction in DIRECTIONS:
            rates = point["rates"][direction]
            assert {"kernel", "kernel, unsorted", "copy engine", "zero_copy", "staged", "split", "torch"} <= set(rates)
            assert min(rates.values()) > 0
            assert point["ratios"][direction] == ways.ratios(rates)
            assert 0 < point["share"][direction] < 1
        assert set(point["both"]) == {"zero_copy", "staged_out", "staged", "split"}


def test_the_probe_takes_rows_of_adam_by_numbers_of_multiprocessors(device: str):
    """Plain kernels move 1,536 bytes as three rows of 512."""
    probe = replace(SMALL, footprints=(12 * MIB,), seconds=600.0).as_probe()
    assert (probe.footprints, probe.seconds) == ((12 * MIB,), 20.0)
    assert ceilings.Plan.of("cuda", False).as_probe().footprints == (8 << 30,)
    if device == "cpu":
        return
    found = ceilings.run(
        device, plan=replace(probe, batch_bytes=MIB // 4, registered_bytes=MIB, multiprocessors=(8, 0))
    )
    assert not found["failed"]
    assert {"cpu", "memory", "together"}.isdisjoint(found)
    (point,) = found["rows"]
    assert point["row_bytes"] == 1536
    assert all(rate > 0 for way in DIRECTIONS for rate in point["rates"][way].values())
    rows = [entry["rows"] for entry in found["multiprocessors"]]
    assert [each["row_bytes"] for each in rows] == [1536] * 2
    assert all(each[way] > 0 for each in rows for way in (*DIRECTIONS, "both_each"))


def test_rows_of_three_times_a_power_of_two_are_taken_in_pieces():
    block = torch.arange(4 * 1536).to(torch.uint8).view(4, 1536)
    pieces = Batch(torch.tensor([2, 5, 9]), block).pieces
    assert pieces.host.tolist() == [6, 7, 8, 15, 16, 17, 27, 28, 29]
    assert torch.equal(pieces.block.flatten(), block[:3].flatten())
    whole = Batch(torch.tensor([2, 5]), block[:, :512].contiguous())
    assert whole.pieces is whole


def test_ratios_are_the_ones_that_are_claimed():
    rates = {"kernel": 40.0, "copy engine": 50.0, "zero_copy": 38.0, "staged": 30.0, "split": 46.0, "torch": 10.0}
    assert ways.ratios(rates) == {
        "zero_copy_over_kernel": 0.95,
        "best_over_copy_engine": 0.92,
        "split_over_either": 46 / 38,
        "best_over_torch": 4.6,
    }
    assert ways.ratios({**rates, "SpeedTorch's method": 23.0})["best_over_speedtorch"] == 2.0


def test_a_way_that_moves_other_bytes_ends_the_run(device: str):
    with Link(MIB, device) as link:
        (batch, *_) = link.batches(MIB, 512, MIB // 8)
        assert batch.block.any()
        table = link.matrix(MIB, 512)
        with pytest.raises(WrongResultError, match="nothing at all moved other bytes to device than it should have"):
            ways._verify("nothing at all", "to_device", lambda batch: None, table, batch)
        with pytest.raises(WrongResultError, match="moved other bytes from device"):
            ways._verify("nothing at all", "from_device", lambda batch: None, table, batch)


def test_what_one_way_has_moved_does_not_vouch_for_the_next(device: str):
    """The rows are already in the table and the block when the second way is verified."""
    with Link(MIB, device) as link:
        (batch, *_) = link.batches(MIB, 512, MIB // 8)
        table = link.matrix(MIB, 512)

        def gather(batch: Batch) -> None:
            batch.block.copy_(table[batch.host].view(torch.uint8))

        def scatter(batch: Batch) -> None:
            table[batch.host] = batch.block.view(torch.float32).cpu()

        for direction, right in zip(DIRECTIONS, (gather, scatter), strict=True):
            ways._verify("the right way", direction, right, table, batch)
            with pytest.raises(WrongResultError, match="nothing at all moved other bytes"):
                ways._verify("nothing at all", direction, lambda batch: None, table, batch)


@pytest.mark.parametrize("way", DIRECTIONS)
def test_contiguous_copies_are_verified_before_they_are_timed(way: str):
    with Link(MIB, "cpu") as link:
        link._verified("the right way", way, lambda to, from_: to.copy_(from_), MIB // 4)
        with pytest.raises(WrongResultError, match=f"nothing at all copied other bytes {way.replace('_', ' ')}"):
            link._verified("nothing at all", way, lambda to, from_: None, MIB // 4)


def test_what_fails_is_said_and_leaves_the_other_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """Each kind is saved before the next begins, which may be cut short."""
    path, plan = tmp_path / "ceilings.json", replace(SMALL, footprints=(4 * MIB,))

    def fails(*_: object) -> None:
        raise WrongResultError("2 threads of the CPU moved other bytes than they should have")

    def memory(*_: object) -> list[object]:
        assert json.loads(path.read_text())["results"]["failed"]
        return []

    monkeypatch.setattr(ceilings.Plan, "of", lambda device, quick: plan)
    monkeypatch.setattr(ceilings, "cpu", fails)
    monkeypatch.setattr(ceilings, "memory", memory)
    assert main(["--device", "cpu", "--json", str(path)]) == 1
    found = json.loads(path.read_text())["results"]
    assert found["failed"] == ["cpu: WrongResultError: 2 threads of the CPU moved other bytes than they should have"]
    assert found["memory"] == []
    assert "WrongResultError" in capsys.readouterr().err


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "available_bytes", lambda: MIB)
    with pytest.raises(BenchmarkError, match=r"0\.00 GiB of memory are needed, which are not free; use --quick"):
        ceilings.run("cpu", plan=SMALL)


def test_tables_that_would_take_all_the_time_are_left_out(monkeypatch: pytest.MonkeyPatch):
    slow = {"bytes": MIB, "huge_pages": True, "faulted_in_before": True, "seconds": {"fault in": 1.0, "register": 1.0}}
    monkeypatch.setattr(ceilings, "registration", lambda nbytes, device: [{**slow, "huge_pages": False}, slow])
    found = ceilings.run("cpu", plan=replace(SMALL, footprints=(4 * MIB, 8 * MIB), seconds=20.0))
    assert found["left_out"] == ["a table of 0 GiB: making it ready takes 16 s"]
    assert found["filled"]["bytes"] == 4 * MIB


def test_what_comes_too_late_is_left_out_and_said(device: str, capsys: pytest.CaptureFixture[str]):
    found = ceilings.run(device, plan=replace(SMALL, footprints=(4 * MIB,), seconds=-1.0))
    late = ["rows of 512 B by 1 threads of the CPU", "the CPU's memory with 1 threads"]
    if device == "cuda":
        late += ["rows of 512 B out of 0 GiB", "rows of 64 B out of 0 GiB", "1 multiprocessors"]
        assert found["rows"] == found["multiprocessors"] == []
        assert found["copy_engine"]
        assert found["together"]
    assert found["cpu"] == found["memory"] == []
    assert {f"{what}: the time was over" for what in late} <= set(found["left_out"])
    assert f"left out: {found['left_out'][-1]}" in capsys.readouterr().out


def panels(figure, path: Path) -> list[str]:
    """Return the label below each panel, each of which must show data."""
    figure.savefig(path / "figure.png")
    for axes in figure.axes:
        assert any(len(line.get_xdata()) for line in axes.lines)
    return [axes.get_xlabel() for axes in figure.axes]


def test_ceilings_draw_the_directions_and_sizes_that_were_measured(tmp_path):
    """With a GPU; without one its CPU's threads."""
    pytest.importorskip("matplotlib")
    written = json.loads((RESULTS / "ceilings-cpu.json").read_text())
    assert panels(ceilings_figure(written["results"]), tmp_path) == ["threads of the CPU"]
    points = [
        {"footprint_bytes": 2**30, "row_bytes": 64, "rates": {"to_device": {"staged": 1e9}, "from_device": {}}},
        {"footprint_bytes": 2**30, "row_bytes": 512, "rates": {"to_device": {"kernel": 1e9}, "from_device": {}}},
        {"footprint_bytes": 2**33, "row_bytes": 64, "rates": {"to_device": {}, "from_device": {"staged": 1e9}}},
    ]
    figure = ceilings_figure({"rows": points, "cpu": []})
    assert panels(figure, tmp_path) == ["bytes of a row"] * 2
    assert [axes.get_title() for axes in figure.axes] == ["to the device, 1.0 GiB", "from the device, 8.0 GiB"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["staged", "kernel"]


def test_a_table_of_part_of_a_gib_has_whole_rows_of_every_width(monkeypatch: pytest.MonkeyPatch):
    plans = []
    monkeypatch.setattr(ceilings, "run", lambda device, plan, keep: plans.append(plan) or {"failed": []})
    assert main(["--device", "cpu", "--quick", "--gib", "1,0.03"]) == 0
    assert plans[0].footprints == (7864 * 4096, 1 << 30)

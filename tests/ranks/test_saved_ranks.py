"""Tables that ranks own, saved and loaded: on any number of ranks, by one process, with torch's own checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import saved_scenarios as scenarios
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool, largest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedswap
from speedswap.cli import main
from speedswap.errors import TableClosedError, TableFormatError

EXACT = 1e-12


def worst(found: list) -> float:
    return largest(off for off, _ in found)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_checkpoint_goes_on_with_any_number_of_ranks(ranks: RankPool, tmp_path: Path, on_disk: bool) -> None:
    """Rows, state and scalars; the second save writes what has changed, and directories of former ranks go."""
    folder, rows = str(tmp_path / "run"), str(tmp_path / "rows") if on_disk else None
    for begin, size in ((0, 2), (2, 3), (4, 3), (6, 1)):
        found = ranks.run(scenarios.save, size, folder, rows, begin)
        assert worst(found) <= EXACT
        assert found[0][1] < 60_000 + 80_000 * on_disk
    if on_disk:
        assert sorted(os.listdir(rows)) == ["MANIFEST", "shard-0-of-1"]


def test_checkpoint_passes_between_one_process_and_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks.run(scenarios.save, 3, folder)
    model, optimizer = scenarios.training(None)
    assert speedswap.load_checkpoint(folder, model, optimizer).step == 2
    scenarios.train(model, optimizer, range(2, 4))
    assert largest([scenarios.off_by(model, 4)]) <= EXACT
    speedswap.save_checkpoint(folder, model, optimizer, step=4)
    assert worst(ranks.run(scenarios.save, 2, folder, None, 4)) <= EXACT


def test_rounded_rows_are_those_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """Stochastic rounding goes on from the number of the write."""
    settings = {"dtype": torch.float32, "stored_dtype": torch.bfloat16}
    for begin, size in ((0, 3), (2, 2)):
        found = ranks.run(scenarios.save, size, str(tmp_path), None, begin, **settings)
        assert largest([off[0]] for off, _ in found) <= 2e-2  # sums of other orders may round to a neighbour


def test_saved_table_is_one_table(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process reads it whole, copies it, and looks at it with the commands; it does not write it."""
    weights = ranks.run(scenarios.save_table, 3, str(tmp_path))[0][0]
    path = tmp_path / "rows"
    assert sorted(os.listdir(tmp_path)) == ["rows"]
    with speedswap.Table.open(path, "r") as table:
        assert torch.equal(table.read(), weights)
        assert {*table.columns} == {"weight", "exp_avg", "exp_avg_sq"}
        assert table.attributes["optimizer"]["scalars"] == {"step": 3.0}
        with pytest.raises(TableClosedError, match="owned by 3 ranks"):
            table.write(0, weights[:1])
        table.save(tmp_path / "one")
    with speedswap.Table.open(tmp_path / "one") as copy:
        assert torch.equal(copy.read(), weights)
        assert copy.writes == 3
    loaded = speedswap.Table.load(path)
    ids = torch.tensor([7, 2099, 0])
    assert torch.equal(loaded.gather(ids).weight, weights[ids])
    with pytest.raises(TableClosedError, match="owned by 3 ranks"):
        speedswap.Table.open(path)
    assert main(["info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["shards"], facts["writes"]) == (scenarios.ROWS, 3, 3)
    assert main(["verify", str(path)]) == 0
    (path / "shard-1-of-3" / "MANIFEST").rename(path / "shard-1-of-3" / "other")
    with pytest.raises(TableFormatError, match="shard-1-of-3"):
        speedswap.Table.open(path, "r")


@pytest.mark.parametrize(("kind", "rank"), [("fsync", 0), ("fsync", 1), ("rename", 0)])
def test_full_disk_of_one_rank_is_an_error_of_all(ranks: RankPool, tmp_path: Path, kind: str, rank: int) -> None:
    """The checkpoint before stays, nothing is left behind, and the next save works."""
    found = ranks.run(scenarios.fail, 2, str(tmp_path), kind, rank)
    assert [each[0] for each in found] == ["TableFullError" if i == rank else "PeerError" for i in range(2)]
    assert found[0][1] == ["000001-step-1"]
    assert found[0][3] == ["000002-step-2"]
    assert largest(each[2] for each in found) <= EXACT


def test_damaged_checkpoint_is_an_error_of_all(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(scenarios.fail, 2, str(tmp_path), "damaged", 1)
    assert {each[0] for each in found} <= {"CheckpointError", "PeerError"}
    assert largest(each[2] for each in found) <= EXACT


@pytest.mark.sweep(1)
@pytest.mark.parametrize("keyed", [False, True])
def test_distributed_checkpoint_of_four_ranks_loads_anywhere(keyed: bool, ranks: RankPool, tmp_path: Path) -> None:
    """On three, on five, on one of a job, and in a process without one; and back. Id maps have any number of bytes."""
    folder = str(tmp_path / "four")
    found = ranks.run(scenarios.save_distributed, 4, folder, keyed)
    assert all(each == (3, True, (scenarios.ROWS, scenarios.DIM), 3 + keyed) for each in found)
    for size in (3, 5, 1):
        assert largest(ranks.run(scenarios.load_distributed, size, folder, keyed)) <= EXACT
    model, optimizer = scenarios.training(None, keyed=keyed)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert largest([scenarios.off_by(model, 3, keyed=keyed)]) <= EXACT
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "one", no_dist=True)
    assert largest(ranks.run(scenarios.load_distributed, 4, str(tmp_path / "one"), keyed)) <= EXACT


def test_state_dict_of_one_process_loads_on_ranks(ranks: RankPool) -> None:
    model, optimizer = scenarios.training(None)
    scenarios.train(model, optimizer, range(3))
    found = ranks.run(scenarios.load_plain, 3, model.state_dict(), optimizer.state_dict())
    assert largest(found) <= EXACT


def test_rows_of_different_steps_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """A kill leaves each rank at its last commit: only a checkpoint makes them one table again."""
    for said in ranks.run(scenarios.open_torn, 2, str(tmp_path / "rows")):
        assert "shards of different steps" in said
        assert "load the last checkpoint" in said


def test_added_columns_begin_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """Also with another number of ranks, which copies no row that was never written; and rows that are reset."""
    wanted, again = scenarios.add_column(None, tmp_path / "one", True)
    assert torch.equal(again, wanted)
    for size in (2, 3):
        for values, again in ranks.run(scenarios.add_column, size, str(tmp_path), size == 2):
            assert torch.equal(values, wanted)
            assert torch.equal(again, wanted)

"""Files of tables that ranks own, for commands and other processes; and saving during training."""

from __future__ import annotations

import json
from pathlib import Path

import files_scenarios as scenarios
import numpy as np
import pytest
import torch
from rank_pool import RankPool, largest

import speedswap
from speedswap.cli import main
from speedswap.errors import TableFormatError


def test_commands_work_on_tables_of_ranks(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those on disk and saved ones: info, verify, convert and export; a pickle is refused, with a remedy.

    So is one rank's part of them, where the whole table is meant.
    """
    (words, items), said = ranks.run(scenarios.on_disk, 3, str(tmp_path))[1]
    assert all("use Table.save(path), and Table.open(path, mode='r') there" in text for text in said)
    for name in ("words", "items", "saved"):
        path, file = str(tmp_path / name), str(tmp_path / f"{name}.npy")
        assert main(["info", path]) == main(["verify", path]) == 0
        assert main(["export", path, file]) == 0
        out = capsys.readouterr().out
        assert f"{path} is whole" in out
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "items.npy")), items)
    with speedswap.Table.open(tmp_path / "saved", "r") as table:
        assert table.id_map is not None
        rows = table.id_map.lookup([f"key {number}" for number in range(6)])
        assert torch.equal(table.gather(rows).weight, words)
    for name in ("items", "saved"):
        require_part(tmp_path / name / "shard-1-of-3", "rank 1's part of", capsys)


def require_part(part: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the directory of one rank's rows says what it is, and that its rows do not pass for the table's."""
    for command in ("info", "verify"):
        assert main([command, str(part)]) == 0
        assert text in capsys.readouterr().out
        assert main([command, "--json", str(part)]) == 0
        assert text in json.loads(capsys.readouterr().out)["part"]
    with speedswap.Table.open(part, "r") as table:
        assert text in repr(table)
        with pytest.raises(ValueError, match=f"open the directory, {part.parent}, in which all ranks' parts lie"):
            table.export(part.parent / "part.npy")
    with pytest.raises(TableFormatError, match=f"open the directory, {part.parent}, in which all ranks' parts lie"):
        speedswap.Table.open(part)
    assert main(["export", str(part), str(part.parent.parent / "part.npy")]) == 2
    assert text in capsys.readouterr().err
    assert not [*part.parent.parent.glob("**/part.npy")]


def test_async_save_has_the_state_of_its_call(ranks: RankPool, tmp_path: Path) -> None:
    """Training goes on before, while and after torch.distributed.checkpoint writes; neither disturbs the other."""
    for each in ranks.run(scenarios.save_beside, 5, str(tmp_path)):
        assert largest(each) <= 1e-12

"""Calls about whole tables that ranks own behave as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import whole_scenarios as scenarios
from rank_pool import RankPool

import speedswap
from speedswap.tables.owners import Owners


@pytest.mark.parametrize(
    ("form", "chunk"), [("none", 7), ("mask", None), ("ids", 64), ("padded", None), ("list", None)]
)
def test_best_rows_are_those_of_one_process(ranks: RankPool, form: str, chunk: int | None) -> None:
    """Three ranks have 5, no and 300 queries, with a k per rank; rows are equal or NaN; forms exclude others."""
    items = speedswap.Embedding.from_pretrained(scenarios.weights(), padding_idx=3)
    for rank, (found, single) in enumerate(ranks.run(scenarios.score, 3, form, chunk)):
        left_out = scenarios.excluded_by(rank, form)
        wanted = items.score(scenarios.queries_of(rank), [6, 1, 40][rank], exclude=left_out)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.values, wanted.values, rtol=0, atol=0, equal_nan=True)
        assert single == items.score(torch.ones(scenarios.WIDTH), 5).ids.tolist()


def test_best_rows_have_keys(ranks: RankPool) -> None:
    wanted = scenarios.score_keys(None)
    for found in ranks.run(scenarios.score_keys, 3):
        assert all(map(torch.equal, found, wanted))


def test_best_rows_of_a_table_in_a_collection(ranks: RankPool) -> None:
    """Its rows are a range of the store's; a table of two rows has owners without any."""
    items = speedswap.Embedding.from_pretrained(scenarios.weights())
    wanted = items.score(scenarios.queries_of(2)[:20], 9, exclude=scenarios.excluded_by(0, "ids"))
    for found, small in ranks.run(scenarios.score_in_collection, 5):
        assert torch.equal(found.ids, wanted.ids)
        assert small == [[1, 0]]


@pytest.mark.parametrize("num_rows", [1, 7, 256, 5000, 70_000, 200_001])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ids_of_a_rank_in_order(num_rows: int, world_size: int) -> None:
    """Numbers count the rank's ids in ascending order, and lead back to them."""
    owners = Owners(num_rows, world_size)
    of_id = owners.of(torch.arange(num_rows))
    for rank in range(world_size):
        ids = (of_id == rank).nonzero().squeeze(1)
        assert owners.count_below(num_rows, rank) == len(ids)
        if not len(ids):
            continue
        assert torch.equal(owners.ids_in_order(rank, 0, len(ids)), ids)
        assert torch.equal(owners.ids_in_order(rank, len(ids) // 3, len(ids)), ids[len(ids) // 3 :])
        some = torch.randint(len(ids), (50,))
        assert torch.equal(owners.ids_numbered(some, rank), ids[some])
        assert torch.equal(owners.numbers_in_order(ids[some], rank), some)
        half = num_rows // 2
        assert owners.count_below(half, rank) == int((ids < half).sum())


def test_first_rank_exports_what_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """Files are those of one process, byte for byte, with keys that three ranks own; an error of one is all ranks'."""
    state = scenarios.export(None, tmp_path)[2]
    found = ranks.run(scenarios.export, 3, tmp_path)
    for name in ("3.npy", "3.safetensors", "3.txt", "3.bin", "3-part.npy"):
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("3", "1", 1)).read_bytes()
    assert [each[0] for each in found] == ["FileExistsError", "PeerError", "PeerError"]
    assert found[0][1:] == found[1][1:] == found[2][1:]
    whole = speedswap.IdMap.from_bytes(torch.tensor(found[1][2], dtype=torch.uint8))
    words = [f"word-{number}" for number in range(250)]
    one = speedswap.IdMap.from_bytes(torch.tensor(state, dtype=torch.uint8))
    assert torch.equal(whole.lookup(words), one.lookup(words))


def test_export_within_a_split_batch_leaves_its_gradients_alone(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks run its passes at their own pace, and serve the first one's export at its pace within them."""
    expected = ranks.run(scenarios.export_while_splitting, 2)[0]
    for found in ranks.run(scenarios.export_while_splitting, 2, tmp_path / "items.npy"):
        assert torch.equal(found, expected)


def test_unknown_column_within_a_split_batch_is_named(ranks: RankPool) -> None:
    for said in ranks.run(scenarios.unknown_column_while_splitting, 2):
        assert said == {"column 'none' is not in table 'items'; it has weight"}


def test_every_method_of_a_table_is_right_or_refuses(ranks: RankPool) -> None:
    """No public method of a table that ranks own is left out: its result is one process's, or it names a remedy."""
    construction = {"create", "open", "load", "from_file", "salvage"}
    elsewhere = {"save", "export", "closed", "columns", "storage", "__enter__", "__exit__"}  # in separate tests
    elsewhere |= {"save_rows", "load_rows", "hold", "changed_since"}
    methods = {name for name, value in vars(speedswap.Table).items() if not name.startswith("_") or name in DUNDERS}
    for found in ranks.run(scenarios.walk, 3):
        assert methods - construction - elsewhere <= found.keys()
        for name in ("gather", "lease", "read", "__array__", "__dlpack__", "written", "columns", "rows_between"):
            assert found.pop(name) is True, name
        assert found.pop("zeros") == 0.0
        assert found.pop("nbytes") == 2 * scenarios.ROWS * scenarios.WIDTH * 4
        refused = {name: text for name, text in found.items() if isinstance(text, str) and "Error: " in text}
        remedies = {
            "view": "use Table.read() and Table.write()",
            "__deepcopy__": "save it",
            "__reduce__": "save",
            "reset_rows": "make the table with one of speedswap.init",
            "check_resettable": "make the table with one of speedswap.init",
            "set_id_map": "make the table with one of speedswap.init",
            "check_rows": "map unknown ids",
            "closed": "open it again",
        }
        assert refused.keys() == remedies.keys(), refused
        for name, remedy in remedies.items():
            assert remedy in refused[name], refused[name]


DUNDERS = {"__array__", "__dlpack__", "__dlpack_device__", "__len__", "__repr__", "__reduce__", "__deepcopy__"}

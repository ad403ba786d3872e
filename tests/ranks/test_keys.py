"""Keys that ranks own get the rows that one process assigns, and train as they do there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import keys_scenarios as scenarios
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool

import speedswap
from speedswap.ranks import owners_of_keys
from speedswap.ranks.route import shares_of

CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.mark.parametrize(("kind", "size"), [(kind, 3) for kind in scenarios.KINDS] + [("int64", 2), ("lfu", 4)])
def test_keys_have_the_rows_of_one_process(ranks: RankPool, kind: str, size: int) -> None:
    """Rows, losses and trained weights are its own, with uneven batches and one of three ranks without any key."""
    losses, known, rows, weights = scenarios.train_embedding(None, kind)
    assert 30 < known < 150  # of the keys that come, some twice
    found = ranks.run(scenarios.train_embedding, size, kind)
    total = torch.tensor([each[0] for each in found], dtype=torch.float64).sum(0)
    torch.testing.assert_close(total, torch.tensor(losses, dtype=torch.float64), **CLOSE)
    for each in found:
        assert each[1:3] == (known, rows)
        torch.testing.assert_close(torch.tensor(each[3]), torch.tensor(weights), **CLOSE)


def test_collections_of_keys_train_as_in_one_process(ranks: RankPool) -> None:
    """Keys of all tables go in one exchange: numbers, strings, plain ids, and two features of one table."""
    losses, known, weights, pages = scenarios.train_collection(None)
    found = ranks.run(scenarios.train_collection, 2)
    total = torch.tensor([each[0] for each in found], dtype=torch.float64).sum(0)
    torch.testing.assert_close(total, torch.tensor(losses, dtype=torch.float64), rtol=1e-13, atol=0)
    for each in found:
        assert each[1] == known
        torch.testing.assert_close(each[3], pages, **CLOSE)
        for name in ("user", "word", "ad"):
            torch.testing.assert_close(torch.tensor(each[2][name]), torch.tensor(weights[name]), **CLOSE)


@pytest.mark.parametrize("kind", ["exact", "lfu", "lru"])
def test_keys_move_to_other_ranks(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    """Trained on 3 ranks, then on 2, then in one process, from checkpoints: as without a break.

    One process reads what ranks have saved as an ordinary table.
    """
    _, known, rows, weights = scenarios.train_embedding(None, kind)
    folder = str(tmp_path / "checkpoints")
    ranks.run(scenarios.train_embedding, 3, kind, end=3, folder=folder)
    again = ranks.run(scenarios.train_embedding, 2, kind, begin=3, end=6, folder=folder)
    keys = scenarios.as_given(kind, torch.arange(150) * 7919 - 1000)
    with speedswap.Table.open(f"{folder}/table-6", "r") as table:
        assert table.id_map is not None
        found = table.id_map.lookup(keys)
        assert found.tolist() == again[0][2]
        assert table.gather(found).weight.tolist() == again[1][3]
    last = scenarios.train_embedding(None, kind, begin=6, folder=folder)
    assert last[1:3] == (known, rows)
    torch.testing.assert_close(torch.tensor(last[3]), torch.tensor(weights), **CLOSE)


@pytest.mark.parametrize(("policy", "admit_after"), [("lru", 1), ("lfu", 1), ("lru", 2)])
def test_owners_evict_among_their_own_keys(ranks: RankPool, policy: str, admit_after: int) -> None:
    """Keys stay that a map of an owner's share keeps; every row has one key, and is reset for a new key."""
    for rows, wanted, are_rows_own, known in ranks.run(scenarios.evict, 3, policy, admit_after):
        assert rows == wanted
        assert are_rows_own
        assert known <= 40
        assert sum(rows) == known


@pytest.mark.parametrize("others", [12, 30])
def test_keys_are_forgotten_after_as_many_others_as_in_one_process(ranks: RankPool, others: int) -> None:
    one = speedswap.IdMap(20, admit_after=2)
    for keys in [torch.arange(1, 6), *torch.arange(100, 100 + others).split(1), torch.arange(1, 6)]:
        rows, _ = one.add(keys)
    assert ranks.run(scenarios.come_back, 3, others) == [rows.tolist()] * 3
    assert rows.any() == (others == 12)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("policy", "admit_after"), [("lru", 2), ("lfu", 1)])
def test_owners_evict_the_same_keys_after_a_checkpoint(
    ranks: RankPool, policy: str, admit_after: int, tmp_path: Path
) -> None:
    """On 2 ranks, on 3 that have taken their keys over, and on 3 that go on from these."""
    for size, begin in ((2, 0), (3, 2), (3, 4)):
        found = ranks.run(scenarios.evict_and_resume, size, policy, admit_after, str(tmp_path), begin)
        for own, resumed in found:
            assert resumed == own
        assert sum(own[0] for own, _ in found) == 41
        assert found[0][0][3] > 36  # of which ranks have evicted


@pytest.mark.sweep(1)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_owners_evict_the_same_keys_after_a_table_is_opened_again(ranks: RankPool, policy: str, tmp_path: Path) -> None:
    """As in a table that was never closed, though ranks had filled their shares unequally."""
    wanted = ranks.run(scenarios.evict_on_disk, 3, policy, str(tmp_path / "open"), [])
    again = ranks.run(scenarios.evict_on_disk, 3, policy, str(tmp_path / "closed"), [1, 2, 7])
    assert again == wanted
    assert [share for share, *_ in wanted] == [14, 14, 13]
    assert wanted[0][3] > 36  # of which ranks have evicted


def test_rows_of_evicted_keys_after_a_rank_was_killed(ranks: RankPool, tmp_path: Path) -> None:
    """As in a job that was not interrupted, to the bit: rows of keys, rows without one, and their state."""
    wanted = ranks.run(scenarios.evict_until_killed, 2, str(tmp_path / "whole"))
    ranks.run(scenarios.evict_until_killed, 2, str(tmp_path / "killed"), 45, lost={1})
    again = ranks.run(scenarios.evict_until_killed, 2, str(tmp_path / "killed"))
    assert all(begin > 0 for begin, _ in again)
    assert [result for _, result in again] == [result for _, result in wanted]


def test_shares_stay_as_ranks_fill_them() -> None:
    assert shares_of(10, [0, 0, 0]) == [4, 3, 3]
    assert shares_of(10, [4, 3, 2]) == [4, 3, 3]
    assert shares_of(10, [7, 1, 0]) == [7, 2, 1]
    assert shares_of(4, [2, 2, 0]) == [2, 2, 0]


@given(st.data(), st.integers(1, 40), st.integers(1, 6))
def test_shares_are_a_partition_that_covers_what_ranks_have(data: st.DataObject, capacity: int, size: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, capacity), min_size=size, max_size=size)))
    used = [stop - start for start, stop in pairwise([0, *cuts])]
    shares = shares_of(capacity, used)
    assert sum(shares) == capacity
    assert all(have <= share for have, share in zip(used, shares, strict=True))
    later = [data.draw(st.integers(have, share)) for have, share in zip(used, shares, strict=True)]
    assert shares_of(capacity, later) == shares


def test_row_that_starts_anew_loses_the_gradient_of_lookups_before(ranks: RankPool) -> None:
    """The key that has the row now moves it by its own gradient, 1; the one before is without a row."""
    for rows, start, after in ranks.run(scenarios.lose_the_gradient, 2):
        assert rows == [0, 1]
        assert after == [[value - 1 for value in start[0]]]


def test_full_map_changes_nothing_on_any_rank(ranks: RankPool) -> None:
    """All raise, whether all rows are taken or one owner's; a bad batch on one rank is a PeerError on the others."""
    found = ranks.run(scenarios.fill, 3)
    assert [each[::2] for each in found] == [["IdMapFullError"] * 2] * 3
    assert [each[1::2] for each in found] == [["PeerError"] * 2, ["TypeError"] * 2, ["PeerError"] * 2]


@pytest.mark.parametrize("step", [1, 26, 2**10, 2**20, 2**32, 2**40])
def test_keys_are_spread_evenly(step: int) -> None:
    """No rank of 64 owns more than 1.05 times the mean of keys in a row, or at a distance of a power of two."""
    numbers = torch.arange(1_000_000) * step - 12345
    counts = torch.bincount(owners_of_keys(numbers, 64), minlength=64)
    assert counts.max() * 64 <= 1.05 * len(numbers)


def test_keys_at_a_pace_of_their_own(ranks: RankPool) -> None:
    """Ranks that make three lookups, two and one give each key one row, and all know it then."""
    found = ranks.run(scenarios.look_up_at_own_pace, 3)
    rows = found[0][1]
    assert sorted(rows.values()) == [0, 1, 2, 3, 4]
    assert rows["e"] == 0
    for own, known, count in found:
        assert (known, count) == (rows, 4)
        assert own == {key: rows[key] for key in own}


def test_keys_of_a_table_on_disk_are_found_again(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks reopen what three have closed, then two, which take over the rows and keys."""
    _, rows, weights = scenarios.train_on_disk(None, None, 0, 8)
    for size, begin, end in ((3, 0, 3), (3, 3, 5), (2, 5, 8)):
        found = ranks.run(scenarios.train_on_disk, size, str(tmp_path / "table"), begin, end)
    for each in found:
        assert each[1] == rows
        torch.testing.assert_close(torch.tensor(each[2]), torch.tensor(weights), **CLOSE)


@pytest.mark.parametrize("kind", ["new", "collection", "on disk"])
def test_evicting_map_is_one_tables(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Rows that are reset in one table would keep another key's values in the other."""
    found = [
        scenarios.share_evicting_map(None, tmp_path / "one", kind),
        *ranks.run(scenarios.share_evicting_map, 2, tmp_path, kind),
    ]
    for said in found:
        assert len(said) == 1
        assert "evicts and belongs to another table" in said[0]

"""A batch for several id maps at once: each does what it does alone, and all of them change, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speedswap
from speedswap import IdMap, kernels
from speedswap.errors import IdMapFullError

SETTINGS: list[dict[str, Any]] = [
    {},
    {"evict": "lru"},
    {"evict": "lfu", "admit_after": 2},
    {"keys": "hashed"},
    {"keys": "exact", "evict": "lru"},
]


def some_keys(step: int, place: int) -> Any:
    keys = torch.randint(40, (30 + place,), generator=torch.Generator().manual_seed(100 * step + place))
    return [f"key {key}" for key in keys.tolist()] if SETTINGS[place].get("keys") else keys


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_maps_do_together_what_each_does_alone(threads: int) -> None:
    together, alone = ([IdMap(40, **settings) for settings in SETTINGS] for _ in range(2))
    try:
        kernels.set_num_threads(threads)
        for step in range(10):
            keys = [some_keys(step, place) for place in range(len(SETTINGS))]
            asked = IdMap.ask_all(together, keys)
            for ours, own, theirs, some in zip(together, asked, alone, keys, strict=True):
                rows, renewed = theirs.add(some)
                assert torch.equal(ours.begin(own), renewed)
                assert torch.equal(own.rows, rows)
    finally:
        kernels.set_num_threads(None)
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours.to_bytes(), theirs.to_bytes())


def test_rows_have_the_shape_of_the_keys() -> None:
    maps = [IdMap(10) for _ in range(3)]
    asked = IdMap.ask_all(maps, [torch.tensor([[7, 8], [7, 9]]), torch.zeros(0, 4).long(), torch.tensor(5)])
    assert [each.rows.tolist() for each in asked] == [[[1, 2], [1, 3]], [], 1]
    assert IdMap.ask_all([], []) == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("full", [0, 1, 2])
def test_no_map_changes_where_one_is_full(full: int, shared: bool) -> None:
    maps = [IdMap(3 if place == full else 9) for place in range(3)]
    maps += maps[:1] if shared else []
    IdMap.ask_all(maps, [torch.tensor([5])] * len(maps))  # a batch that waits for its turn
    before = [each._map.cursor for each in maps]
    with pytest.raises(IdMapFullError, match="2 rows left of 3"):
        IdMap.ask_all(maps, [torch.tensor([6, 7, 8])] * len(maps))
    assert [each._map.cursor for each in maps] == before


def test_a_map_of_several_tables_is_asked_once_for_each() -> None:
    shared, own = IdMap(10), IdMap(10)
    keys = [torch.tensor([3, 4]), torch.tensor([3]), torch.tensor([5, 3])]
    assert [each.rows.tolist() for each in IdMap.ask_all([shared, own, shared], keys)] == [[1, 2], [1], [3, 1]]


def test_ctrl_c_after_the_loops_changes_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [IdMap(2, evict="lru") for _ in range(3)]
    for each in maps:
        each.add(torch.tensor([1, 2]))
    before = [each.to_bytes() for each in maps]

    def interrupted(*args: Any) -> None:
        add_to_maps(*args)
        raise KeyboardInterrupt

    add_to_maps = kernels.add_to_maps
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "add_to_maps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            IdMap.ask_all(maps, [torch.tensor([3])] * 3)
    assert all(torch.equal(each.to_bytes(), raw) for each, raw in zip(maps, before, strict=True))
    asked = IdMap.ask_all(maps, [torch.tensor([3])] * 3)
    assert [each.begin(own).tolist() for each, own in zip(maps, asked, strict=True)] == [[1]] * 3


def test_a_step_that_ends_early_leaves_no_batch_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the rows of the second of three tables are reset: no map waits for a turn that never comes."""
    configs = [speedswap.EmbeddingBagConfig(name=name, embedding_dim=2, id_map=IdMap(4, evict="lru")) for name in "abc"]
    collection = speedswap.EmbeddingBagCollection(configs)
    collection({name: torch.arange(4) for name in "abc"})

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collection.groups[0].keyed["b"], "renew", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collection({name: torch.arange(2, 6) for name in "abc"})
    assert not any(each.waits for each in collection.id_maps.values())
    collection({name: torch.arange(2, 6) for name in "abc"})
    assert {tuple(each.lookup(torch.arange(6)).tolist()) for each in collection.id_maps.values()} == {
        (0, 0, 3, 4, 1, 2)
    }

"""Tables in jobs of several processes: the scenarios of a module, each in a real job of two."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import speedswap
from speedswap.errors import RanksError, WeightError

SCENARIOS = Path(__file__).with_name("table_scenarios.py")


def scenarios() -> list[str]:
    functions = [node for node in ast.parse(SCENARIOS.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("check_")]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios())
def test_tables_on_two_ranks(ranks: RankPool, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank found the scenario to be as it should."""
    monkeypatch.syspath_prepend(SCENARIOS.parent)
    ranks.run(check, 2, f"{SCENARIOS.stem}.{scenario}", alone=True)


@pytest.fixture
def job_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group that this process has to itself."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("job_of_one")
def test_one_process_trains_its_table_without_a_word() -> None:
    """There are no other tables to differ from."""
    model = nn.Sequential(speedswap.Embedding(20, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    before = model[0].table.read()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (model[0].table.read() != before).any(1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.usefixtures("job_of_one")
def test_sharding_a_weight_is_an_error_that_says_how_to_leave_it_out() -> None:
    model = nn.Sequential(speedswap.Embedding(20, 4, name="items"), nn.Linear(4, 1))
    with pytest.raises(WeightError, match=r"'items' .*ignored_params=speedswap.parameters_to_ignore"):
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def test_weight_that_was_replaced_is_named_as_such() -> None:
    """Wrappers replace it with their own parameters, which no table would hear of."""
    items = speedswap.Embedding(20, 4, name="items")
    items._parameters["weight"] = nn.Parameter(torch.ones(20, 4))
    with pytest.raises(RanksError, match=r"'items' was replaced .*ignored_params=speedswap.parameters_to_ignore"):
        items(torch.tensor([1, 2]))


def test_local_tables_are_named_so_wherever_they_are_made() -> None:
    """Bags and given rows take the word, and a pickled one keeps it."""
    rows, place = torch.randn(5, 2), speedswap.Pageable(local_to_rank=True)
    for made in (
        speedswap.EmbeddingBag(5, 2, storage=place),
        speedswap.Embedding.from_pretrained(rows, storage=place),
        speedswap.EmbeddingBag.from_pretrained(rows, storage=place),
    ):
        assert made.local_to_rank
    assert not speedswap.Embedding(5, 2).local_to_rank


def test_ranks_without_a_job_name_the_call_that_is_missing():
    with pytest.raises(ValueError, match=r"Ranks was given, but .* call torch.distributed.init_process_group"):
        speedswap.Embedding(10, 4, storage=speedswap.Ranks())

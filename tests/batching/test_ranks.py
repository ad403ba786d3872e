"""The splitter with more than one process: the scenarios of some modules, each in a real job."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rank_pool import RankPool, check
from torch.distributed.fsdp import FSDPModule

MODULES = ["collectives_scenarios", "replicated_scenarios", "sharded_scenarios", "lost_scenarios"]


def scenarios() -> list[str]:
    """Return the names of the modules' functions that begin with "check_"; the modules are imported by ranks alone."""
    found = []
    for module in MODULES:
        code = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
        functions = [node.name for node in code.body if isinstance(node, ast.FunctionDef)]
        found += [f"{module}.{name}" for name in functions if name.startswith("check_")]
    return found


@pytest.mark.sweep(56)
@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios())
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(ranks: RankPool, scenario: str, world_size: int) -> None:
    if "sharded" in scenario and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch before 2.12 cannot bring layers under fully_shard back from a failure")
    lost = {world_size - 1} if "lost" in scenario else ()
    ranks.run(check, world_size, scenario, alone=True, lost=lost)

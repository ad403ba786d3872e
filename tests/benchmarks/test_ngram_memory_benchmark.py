"""The benchmark of the memory of n-grams writes what its table reads."""

from __future__ import annotations

import json
from pathlib import Path

import bench_ngram_memory
import pytest
import readme_figures

pytestmark = pytest.mark.release


def test_figures_of_a_small_run(tmp_path: Path) -> None:
    """Its made-up language is learnt in 20 steps by the memory alone."""
    assert bench_ngram_memory.main(["--quick", "--seeds", "1", "--device", "cpu", "--json", str(tmp_path / "it")]) == 0
    found = json.loads((tmp_path / "it").read_text())["results"]
    (run,) = found["quality"]["seeds"]
    assert run["with"] < run["without"] / 2
    for step in found["steps"]:
        assert step["flops"]["without"] < step["flops"]["disk"]
        assert 0 < step["rows_per_step"] <= step["tokens"] * 8
    perplexity, pageable, disk, processor, fresh, moved, *larger = readme_figures.ngram_memory(found)
    assert len(larger) == 5
    assert perplexity[2].startswith("the model alone ")
    assert "10,000,000 rows of 16, pageable" in pageable[0]
    assert "1,000,000,000 rows of 16, disk" in disk[0]
    assert processor[0].startswith("processor time of that step: pageable ")
    assert fresh[0].startswith("its first steps on a fresh table on disk: ")
    assert moved[1].endswith(" MiB")

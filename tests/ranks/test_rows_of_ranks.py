"""Files of changed rows, of tables that ranks own: one file, for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import rows_scenarios as scenarios
from rank_pool import RankPool


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("size", [1, 3])
def test_changed_rows_pass_between_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, size: int, on_disk: bool
) -> None:
    path = str(tmp_path / "table") if on_disk else None
    for ids, are_equal in ranks.run(scenarios.save, size, str(tmp_path), path):
        assert ids == [*range(0, 60 * 7, 7)]
        assert are_equal


def test_what_ranks_cannot_do_is_refused_on_all_of_them(ranks: RankPool, tmp_path: Path) -> None:
    for rank, errors in enumerate(ranks.run(scenarios.refuse, 2, str(tmp_path))):
        assert len(errors) == 4
        assert "keeps no commits to compare with" in errors[0]
        assert '"seed": 6' in errors[1]
        assert "table 'items'" in errors[2]
        assert ("which exists; give overwrite=True", "PeerError: rank 0 failed")[rank] in errors[3]

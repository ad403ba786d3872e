"""Pictures of results: a panel per measurement, and none for omitted ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from speedswap.apps.bench import plots

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LATE = [{"rows": 10, "skipped": "the 12 seconds for this benchmark are over"}]


def result(name: str) -> dict:
    return copy.deepcopy(json.loads((RESULTS / f"{name}-cpu.json").read_text())["results"])


def panels(figure, path: Path) -> list[str]:
    """Return the label below each panel, each of which must show data."""
    figure.savefig(path / "figure.png")
    for axes in figure.axes:
        assert axes.patches or any(len(line.get_xdata()) for line in axes.lines)
    return [axes.get_xlabel() for axes in figure.axes]


STORES = ["GB/s; dotted: a contiguous copy"] * 2
SWEEPS = ["bytes of a row", "rows of a batch", "bytes of the table"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("left_out", [(), ("table_bytes",), ("row_bytes", "batch_rows"), tuple(plots._AXES)])
def test_sweep_that_was_left_out_has_no_panel(left_out, tmp_path):
    """A quick run often ends before the last sweep."""
    found = result("transfer")
    found["sweeps"] = {axis: [found["table"]] for axis in plots._AXES}  # a small machine leaves out some
    for axis in left_out:
        found["sweeps"][axis] = [{axis: 64, "skipped": "the 12 seconds for this benchmark are over"}]
    kept = [label for axis, label in zip(plots._AXES, SWEEPS, strict=True) if axis not in left_out]
    assert panels(plots.transfer_figure(found), tmp_path) == STORES + kept


def test_step_without_sizes_overlap_or_an_optimizer_draws_the_rest(tmp_path):
    """Each may be omitted for lack of time or memory."""
    bars, sizes, overlap = (
        "ms per step; a bar that reaches the edge is longer",
        "rows of the table",
        "compute over swap",
    )
    found = result("step")
    assert panels(plots.step_figure(found), tmp_path) == [bars] * 3 + [sizes, overlap]
    found["sizes"] = [{"optimizer": "sgd", "dim": 8, "tables": LATE}]
    assert panels(plots.step_figure(found), tmp_path) == [bars] * 3 + [overlap]
    found["optimizers"]["adam"]["trainers"] = {"speedswap": {"package": "speedswap", **LATE[0]}}
    assert panels(plots.step_figure(found), tmp_path) == [bars] * 2 + [overlap]
    assert panels(plots.step_figure(found | {"overlap": []}), tmp_path) == [bars] * 2
    assert panels(plots.step_figure(found | {"optimizers": {}}), tmp_path) == [overlap]


def test_figure_without_panels_is_not_written(tmp_path):
    """Neither an empty picture nor an error after the measuring."""
    nothing = plots.arrange([])
    assert plots.draw(tmp_path / "a.png", {"transfer": nothing}) == []
    something = plots.step_figure(result("step"))
    assert plots.draw(tmp_path / "a.png", {"transfer": nothing, "step": something}) == [tmp_path / "a-step.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["a-step.png"]

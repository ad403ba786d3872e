"""The profile of a step: lanes, overlap and picture of a trace that is written here, and of one that is recorded."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import step_profile as profile
import torch
from torch.profiler import record_function

from speedswap.apps.bench import step
from speedswap.apps.errors import BenchmarkError

pytestmark = pytest.mark.release

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def event(name, begin, dur, *, cat="kernel", stream=7, thread=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin,
        "dur": dur,
        "pid": 0,
        "tid": stream if cat.startswith(("kernel", "gpu")) else thread,
        "args": {"stream": stream, **args},
    }


GPU = [
    event("void at::native::vectorized_elementwise_kernel<4>", 100, 100),  # compute from 100 to 200
    event("void at::native::indexSelectLargeIndex<float>", 220, 30),
    event("void at::native::vectorized_gather_kernel<16>", 250, 10),
    event("gather_w16", 210, 10, block=[256, 1, 1]),  # rows that are forwarded on the GPU
    event("gather_w16", 150, 100, stream=13, block=[1024, 1, 1]),  # in, from 150 to 250
    event("void cub::DeviceRadixSortOnesweepKernel", 130, 20, stream=13),
    event("Memcpy HtoD (Pinned -> Device)", 260, 20, cat="gpu_memcpy", stream=13, bytes=1 << 20),
    event("Memcpy DtoH (Device -> Pinned)", 255, 1, cat="gpu_memcpy", stream=13, bytes=8),
    event("scatter_bfloat16_w16", 180, 50, stream=20, block=[1024, 1, 1]),  # out, from 180 to 230
    event("gather", 0, 1000, cat="cpu_op"),
    {"ph": "i", "name": "no span", "ts": 5},
]


def test_lanes_of_a_gpu_are_its_streams():
    found = {lane.name: lane for lane in profile.lanes(GPU)}
    main, swap_in, swap_out = (found[f"GPU stream {number}"] for number in (7, 13, 20))
    assert [span.kind for span in main.spans] == ["compute"] * 4
    assert [(span.begin, span.kind) for span in swap_in.spans] == [
        (130, "ids"),
        (150, "swap in"),
        (255, "ids"),  # eight bytes are a count
        (260, "swap in"),
    ]
    assert [(span.begin, span.end, span.kind) for span in swap_out.spans] == [(180, 230, "swap out")]
    assert all(lane.on_gpu for lane in (main, swap_in, swap_out))


def test_figures_are_those_of_the_gpu():
    found = profile.figures(profile.lanes(GPU))
    # Swap: 150 to 250 and 260 to 280; compute: 100 to 200 and 210 to 260; both ways: 180 to 230.
    assert found["of"] == "the GPU's streams"
    assert found["seconds"] == pytest.approx(
        {"compute": 150e-6, "swap in": 120e-6, "swap out": 50e-6, "ids": 21e-6, "anything": 180e-6}
    )
    assert found["swap"] == pytest.approx(120e-6)
    assert found["swap_hidden"] == pytest.approx((50 + 40) / 120)
    assert found["both_directions"] == pytest.approx(1.0)


def test_the_kernels_that_move_rows_are_known_by_their_names():
    names = re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?((?:gather|scatter)\w*)\(", expanded_kernels())
    assert {"gather_w16", "scatter_w1", "gather_int8", "scatter_float16_w2"} <= set(names)
    for name in names:
        kind = "swap in" if name.startswith("gather") else "swap out"
        assert profile._swaps(event(name, 0, 1, block=[1024, 1, 1])) == kind
        assert profile._swaps(event(name, 0, 1, block=[256, 1, 1])) is None


def expanded_kernels():
    command = ["c++", "-x", "c++", "-std=c++17", "-E", "-P", f"-I{CSRC}", str(CSRC / "rows.cuh")]
    return re.sub(r"\s+", " ", subprocess.run(command, capture_output=True, text=True, check=True).stdout)


THREADS = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "main"}},
    event("aten::mm", 0, 100, cat="cpu_op"),
    event("aten::resize_", 10, 5, cat="cpu_op"),  # inside the product
    event("aten::add", 120, 30, cat="cpu_op"),
    event("step", 0, 500, cat="user_annotation"),
    event("swap in", 50, 100, cat="user_annotation", thread=2),
    event("ids", 50, 20, cat="user_annotation", thread=2),
    event("aten::sort", 55, 10, cat="cpu_op", thread=2),  # which the range counts already
    event("swap out", 140, 40, cat="user_annotation", thread=3),
]


def test_lanes_of_threads_are_their_ranges():
    found = profile.lanes(THREADS)
    spans = {lane.name: [(span.begin, span.end, span.kind) for span in lane.spans] for lane in found}
    assert spans == {
        "main": [(0, 100, "compute"), (120, 150, "compute")],
        "thread 0/2": [(50, 70, "ids"), (70, 150, "swap in")],
        "thread 0/3": [(140, 180, "swap out")],
    }
    figures = profile.figures(found)
    assert figures["of"] == "threads"
    assert figures["swap_hidden"] == pytest.approx((30 + 30) / 110)
    assert figures["both_directions"] == pytest.approx(10 / 40)


def test_without_a_swap_there_are_no_shares():
    found = profile.figures(profile.lanes(THREADS[:4]))
    assert (found["swap"], found["swap_hidden"], found["both_directions"]) == (0, None, None)
    assert profile.figures([])["seconds"]["anything"] == 0


def test_traces_are_read_plain_and_compressed(tmp_path):
    text = json.dumps({"traceEvents": THREADS})
    (tmp_path / "t.json").write_text(text)
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        file.write(text)
    assert profile.read(tmp_path / "t.json") == profile.read(tmp_path / "t.json.gz") == THREADS


def test_picture_has_a_lane_for_each(tmp_path):
    pytest.importorskip("matplotlib")
    found = profile.lanes([*GPU, *THREADS])
    profile.draw(tmp_path / "p.svg", found, profile.figures(found))
    drawn = (tmp_path / "p.svg").read_text()
    for words in ("GPU stream 13", "main", "swap beside compute: 75%; both directions at once: 100%"):
        assert f"<!-- {words} -->" in drawn


def test_without_matplotlib_the_trace_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchmarkError, match="a plot needs matplotlib"):
        profile.draw(tmp_path / "p.png", profile.lanes(THREADS), {})
    found = profile.record(lambda count: iter([torch.ones(3) + 1] * count), tmp_path, "t", "cpu")
    assert found["files"] == ["t-trace.json.gz"]
    assert "matplotlib" in found["picture"]


def test_a_recorded_loop_shows_the_work_beside_it(tmp_path):
    """A swap that lasts exactly as long as the step's compute: each waits for an event of the other."""

    def steps(count):
        for _ in range(count):
            computed = threading.Event()
            began = threading.Event()

            def swap(began=began, computed=computed):
                with record_function("swap in"):
                    began.set()
                    assert computed.wait(60)

            beside = threading.Thread(target=swap)
            beside.start()
            assert began.wait(60)
            torch.ones(400, 400) @ torch.ones(400, 400)
            computed.set()
            beside.join()
            yield

    if not profile._all_threads():
        pytest.skip("this torch records the calling thread alone")
    found = profile.record(steps, tmp_path, "loop", "cpu")
    assert found["of"] == "threads"
    assert found["seconds"]["swap in"] > 0
    assert 0 < found["swap_hidden"] <= 1
    assert found["seconds"]["swap out"] == 0


def test_the_script_records_a_step(tmp_path, monkeypatch, capsys):
    """A trace and the figures; without a picture where matplotlib is missing."""
    small = step.StepPlan(2000, 8, 512, 4, 1, {}, (), ())
    monkeypatch.setattr(step.StepPlan, "of", lambda device, quick: small)
    report, folder = tmp_path / "report.json", tmp_path / "profile"
    assert profile.main([str(folder), "--device", "cpu", "--json", str(report)]) == 0
    assert (folder / "step-trace.json.gz").is_file()
    document = json.loads(report.read_text())
    assert document["benchmark"] == "step-profile-cpu"
    assert document["results"]["seconds"]["compute"] > 0
    assert "swap_hidden" in capsys.readouterr().out

"""The command: JSON of one shape, pictures, peers that are missing and why, and mistakes in one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import readme_figures
import torch
from peers import find_peer

from speedswap.apps.bench import measure, step, transfer
from speedswap.apps.bench.measure import Peer, zipf_batches
from speedswap.apps.bench.step import Contestant, contestants
from speedswap.apps.bench.transfer import peer_makers, transfer_peers
from speedswap.cli import main

SWEEPS = {"row_bytes": (64, 512), "batch_rows": (256,), "table_bytes": (2**24, 2**60)}
SMALL_TRANSFER = transfer.TransferPlan(2**24, 512, 1024, 2, SWEEPS, 1000)
SMALL_STEP = step.StepPlan(2000, 8, 512, 4, 1, {8: (2000, 4000)}, ("sgd",), (1.0,))


@pytest.fixture
def small(monkeypatch):
    """Sizes that take a second, and no pauses between calls: figures are not checked."""
    monkeypatch.setattr(measure, "REST_SECONDS", 0.0)
    monkeypatch.setattr(transfer.TransferPlan, "of", lambda device, quick: SMALL_TRANSFER)
    monkeypatch.setattr(step.StepPlan, "of", lambda device, quick: SMALL_STEP)


def check_transfer(found):
    assert found["threads"] == torch.get_num_threads()
    assert found["peers"]["torch"] == {"version": torch.__version__, "missing": None}
    ours = {name for name, store in found["table"]["stores"].items() if store["package"] == "speedswap"}
    assert ours >= {"speedswap, device", "speedswap, pageable", "speedswap, disk"}
    for point in [found["table"], *found["sweeps"]["row_bytes"], *found["sweeps"]["batch_rows"]]:
        for way in ("to_device", "from_device"):
            for entry in [point["floors"]["host"], *point["stores"].values()]:
                assert entry[way]["seconds"] > 0
                rate = point["payload_bytes"] / entry[way]["seconds"] / 1e9
                assert entry[way]["gb_per_second"] == pytest.approx(rate)
        assert {"torch, pageable", "numpy, pageable"} <= set(point["stores"])
    assert [point["row_bytes"] for point in found["sweeps"]["row_bytes"]] == [64, 512]
    fitting, too_large = found["sweeps"]["table_bytes"]
    assert fitting["table_bytes"] == 2**24
    assert "not free" in too_large["skipped"]
    taken = {entry["what"]: entry for entry in found["memory"]}
    assert taken["speedswap, disk"]["table_bytes"] == 512_000
    assert all(entry.keys() >= {"anonymous_bytes", "file_bytes", "device_bytes"} for entry in taken.values())


def check_step(found):
    assert found["workload"]["rows"] == 2000
    assert 0 < found["workload"]["unique_rows"] < 512
    assert set(found["optimizers"]) == {"sgd", "adagrad", "adam"}
    for result in found["optimizers"].values():
        seconds = {name: entry["seconds"] for name, entry in result["trainers"].items()}
        assert min(seconds.values()) > 0
        for name, over in result["time_over"].items():
            assert over == pytest.approx({peer: seconds[name] / seconds[peer] for peer in over})
        assert {"speedswap", "speedswap, lookahead"} <= set(result["time_over"])
    (sizes,) = found["sizes"]
    first, last = sizes["tables"]
    assert (first["rows"], last["rows"]) == (2000, 4000)
    assert min(first["seconds"], last["seconds"]) > 0
    for entry in found["overlap"]:
        assert set(entry["seconds"]) == {"compute", "swap", "plain", "lookahead"}
        larger = max(entry["seconds"]["compute"], entry["seconds"]["swap"])
        assert entry["lookahead_over_larger"] == pytest.approx(entry["seconds"]["lookahead"] / larger)


def check_readme_lines(results):
    """Check that README's rows can be made of what was found, with the figures of the files."""
    rows = [*readme_figures.transfer(results["transfer"]), *readme_figures.step(results["step"])]
    pageable = results["transfer"]["table"]["stores"]["speedswap, pageable"]["to_device"]["seconds"]
    assert rows[0][1] == f"{1000 * pageable:.2f} ms"
    adam = f"{1000 * results['step']['optimizers']['adam']['trainers']['speedswap']['seconds']:.1f} ms"
    assert sum(ours == adam and peer.startswith("torch SparseAdam ") for _, ours, peer, _ in rows) == 1


@pytest.mark.release
def test_both_benchmarks_write_what_they_print(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "all.json", tmp_path / "all.png"
    assert main(["bench", "--device", "cpu", "--json", str(report), "--plot", str(plot)]) == 0
    document = json.loads(report.read_text())
    assert document["benchmark"] == "all-cpu"
    assert document["machine"]["torch"] == torch.__version__
    check_transfer(document["results"]["transfer"])
    check_step(document["results"]["step"])
    printed = capsys.readouterr().out
    for expected in ("speedswap, disk", "torch, pageable", "A step with adam", "speed from device over "):
        assert expected in printed
    check_readme_lines(document["results"])
    for name in ("transfer", "step"):
        assert (tmp_path / f"all-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_benchmark_alone(small, tmp_path):
    report, plot = tmp_path / "step.json", tmp_path / "step.svg"
    assert main(["bench", "step", "--device", "cpu", "--json", str(report), *_plot(plot)]) == 0
    document = json.loads(report.read_text())
    assert document["benchmark"] == "step-cpu"
    assert [entry["compute_asked_for"] for entry in document["results"]["overlap"]] == [1.0]
    assert not _plot(plot) or "<svg" in plot.read_text()


def _plot(path):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    return ["--plot", str(path)]


def test_a_wrong_store_ends_the_run_with_one_line_and_no_file(small, monkeypatch, tmp_path, capsys):
    real = peer_makers("cpu")["torch"]["pageable"]

    def broken(rows, buffers, folder):
        right = real(rows, buffers, folder)
        return replace(right, package="broken", gather=lambda batch: right.gather(batch) + 1)

    monkeypatch.setattr(transfer, "peer_makers", lambda device: {"torch": {"pageable": broken}})
    monkeypatch.setattr(transfer.TransferPlan, "of", lambda device, quick: replace(SMALL_TRANSFER, memory_rows=0))
    assert main(["bench", "transfer", "--device", "cpu", "--json", str(tmp_path / "never.json")]) == 2
    err = capsys.readouterr().err
    assert "broken, pageable gathers row" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_peer_that_cannot_be_made_is_left_out_with_its_reason(monkeypatch, tmp_path):
    def failing(rows, buffers, folder):
        raise OSError("no such device")

    makers = {**peer_makers("cpu"), "numpy": {"memmap": failing}}
    monkeypatch.setattr(transfer, "peer_makers", lambda device: makers)
    found = transfer.run("cpu", folder=tmp_path, plan=replace(SMALL_TRANSFER, memory_rows=0))
    assert found["peers"]["numpy"]["missing"] == "failed: OSError: no such device"
    assert "torch, pageable" in found["table"]["stores"]
    assert not list(tmp_path.iterdir())  # tables on disk are gone


def test_peers_that_are_missing_say_why():
    if not torch.cuda.is_available():
        assert transfer_peers("cuda")["SpeedTorch's method (CuPy)"].missing
    assert find_peer("no_such_library", "none", "pip it") == Peer(None, "not installed: pip it")
    assert find_peer("no_such_library", "none").missing == "not installed: No module named 'no_such_library'"


def test_a_library_built_for_another_torch_is_missing(tmp_path, monkeypatch):
    (tmp_path / "built_for_another.py").write_text("raise OSError('undefined symbol: x\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_peer("built_for_another", "none")
    assert found == Peer(None, "cannot be imported: OSError: undefined symbol: x")


MISTAKES = {
    "unknown device": (["--device", "tpu"], "device is 'tpu': give cpu or cuda"),
    "no threads": (["--threads", "0"], "threads is 0"),
    "no such folder": (["--folder", "nowhere"], "folder is 'nowhere': give a directory, for transfer or all"),
    "json into nowhere": (["--json", "nowhere/x.json"], "does not exist"),
    "plot is a directory": (["--plot", "."], "'.' is a directory"),
    "plot of an unknown format": (["--plot", "x.xyz"], "plot is 'x.xyz': give a name that ends in .png, .svg or .pdf"),
    "plot without a format": (["--plot", "picture"], "plot is 'picture': give a name that ends in"),
    "folder without a transfer": (["step", "--folder", "."], "folder is '.': give a directory, for transfer or all"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_the_work(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *MISTAKES[name][0]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert MISTAKES[name][1] in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu_is_one_line(capsys):
    assert main(["bench", "step", "--device", "cuda"]) == 2
    assert "device is 'cuda', but CUDA is not usable here" in capsys.readouterr().err


def test_sizes_without_room_are_left_out():
    plan = replace(SMALL_STEP, sizes={8: (2000, 10**13)})
    found = step.over_sizes("sgd", 8, plan.sizes[8], "cpu", plan)
    assert "seconds" in found["tables"][0]
    assert found["tables"][1]["skipped"] == "298023.2 GiB of memory are not free"


def test_the_second_of_two_calls_counts():
    """The first call of each pair is slow, as if waking its threads; the warm-up is slower still."""
    calls = []

    def candidate(number):
        calls.append(number)
        time.sleep(0.4 if len(calls) <= 2 else 0.25 if len(calls) % 2 else 0.002)

    found = measure.in_turn({"one": candidate}, repeats=3, warm_up=1)
    assert 0.002 <= found["one"] < 0.2
    assert calls == list(range(8))


@pytest.mark.parametrize("gib", [4, 12, 24, 500])
def test_all_stores_of_the_transfer_benchmark_fit_in_memory(gib, monkeypatch):
    """Also where a virtual machine reports its host's cache, of hundreds of MiB."""
    monkeypatch.setattr(transfer, "spare_bytes", lambda: gib * 2**30)
    monkeypatch.setattr(transfer, "cache_bytes", lambda: 480 * 2**20)
    size = transfer.TransferPlan.of("cpu", quick=False).table_bytes
    assert 0 < 6 * size <= gib * 2**30
    assert size <= 8 * 480 * 2**20


def test_a_slow_candidate_is_called_less_often(monkeypatch):
    monkeypatch.setattr(measure, "ENOUGH_SECONDS", 0.15)
    calls = {"slow": 0, "fast": 0}

    def candidate(name, seconds):
        def call(number):
            calls[name] += 1
            time.sleep(seconds)

        return call

    found = measure.in_turn({"slow": candidate("slow", 0.1), "fast": candidate("fast", 0.0)}, repeats=5, warm_up=0)
    assert calls == {"slow": 4, "fast": 10}
    assert found["slow"] >= 0.1 > found["fast"]


def test_steps_count_from_the_second_to_the_last_but_one():
    def loop(repeat):
        for seconds in (0.2, 0.2, 0.004, 0.004, 0.2):
            time.sleep(seconds)
            yield

    found = measure.steps_in_turn({"loop": loop}, steps=5, repeats=1, warm_up=0)
    assert 0.004 <= found["loop"] < 0.1


def test_a_library_that_fails_is_left_out_with_its_reason(small, monkeypatch):
    """Its constructor may raise anything; an error of ours would end the run."""

    def failing(num_rows, dim, optimizer, device):
        raise TypeError("no such argument")

    def one_more(optimizer, device, dense=None):
        return [*contestants(optimizer, device), Contestant("FBGEMM on Tuesday", "other", failing)]

    monkeypatch.setattr(step, "contestants", one_more)
    found = step.compare("sgd", "cpu", SMALL_STEP, zipf_batches(2000, 512, 32, "cpu"))
    assert found["trainers"]["FBGEMM on Tuesday"]["skipped"] == "failed: TypeError: no such argument"
    monkeypatch.setattr(step, "contestants", lambda *_, **__: [Contestant("speedswap", "speedswap", failing)])
    with pytest.raises(TypeError):
        step.compare("sgd", "cpu", SMALL_STEP, zipf_batches(2000, 512, 32, "cpu"))

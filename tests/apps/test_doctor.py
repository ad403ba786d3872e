"""``speedswap doctor``: findings with remedies, bytes as tables have them, places that fit, lines that run."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import speedswap
from speedswap import _machine
from speedswap.apps.doctor import Finding, Rates, TableAdvice, TableSpec, advise, estimate, examine, lines
from speedswap.apps.doctor import cli as doctor
from speedswap.apps.doctor.places import distinct
from speedswap.cli import main

GIB = 2**30
FINDINGS = "speedswap.apps.doctor.findings"
RATES = Rates(100, gather=1e6, scatter=2e6, lookup_seconds=1e-3, reads=500.0, writes=3e4, access="O_DIRECT …")


@pytest.fixture
def short(monkeypatch):
    """Samples that take a tenth of a second; rates are not checked."""
    monkeypatch.setattr("speedswap.apps.bench.measure.REST_SECONDS", 0.0)
    for name, value in {
        "_MEMORY_SAMPLE": 2**20,
        "_DISK_SAMPLE": 2**20,
        "_CACHE_BYTES": 2**16,
        "_READ_SECONDS": 0.01,
    }.items():
        monkeypatch.setattr(f"speedswap.apps.doctor.rates.{name}", value)


def found(monkeypatch, batch=1024, **machine) -> dict[str, Finding]:
    """Return the findings of a machine of which some facts are others."""
    for name, value in machine.items():
        owner = "speedswap._machine" if hasattr(_machine, name) else FINDINGS
        monkeypatch.setattr(f"{owner}.{name}", value)
    return {each.what: each for each in examine(batch)}


# ---- findings -------------------------------------------------------------------------------------------------------


def test_only_what_is_not_well_has_a_remedy(monkeypatch):
    for each in found(monkeypatch).values():
        assert bool(each.remedy) == (each.level != "ok")


def test_more_threads_than_a_containers_cores_are_slow(monkeypatch):
    monkeypatch.setattr(f"{FINDINGS}.kernels.get_num_threads", lambda: 8)
    each = found(monkeypatch, cores=lambda: 2.5)["threads"]
    assert each == ("slow", "threads", "8 on 2.5 cores: they wait for each other", "export OMP_NUM_THREADS=2")
    assert found(monkeypatch, cores=lambda: 0.5)["threads"].remedy == "export OMP_NUM_THREADS=1"
    assert found(monkeypatch, cores=lambda: 17.0)["threads"].remedy == "export OMP_NUM_THREADS=17"
    assert found(monkeypatch, cores=lambda: 16.0)["threads"].level == "ok"  # a core has two hyperthreads
    assert found(monkeypatch, cores=lambda: 64.0, is_launched=lambda: True)["threads"].level == "ok"


def test_huge_pages_that_are_off_are_slow(monkeypatch):
    each = found(monkeypatch, pages=lambda: "4 KiB; huge pages: never")["huge pages"]
    assert each.level == "slow"
    assert each.remedy == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    assert found(monkeypatch, pages=lambda: "4 KiB; huge pages: on request")["huge pages"].level == "ok"


def test_several_nodes_are_slow(monkeypatch, tmp_path):
    (tmp_path / "node0").mkdir()
    assert "NUMA" not in found(monkeypatch, _NODES=tmp_path)
    (tmp_path / "node1").mkdir()
    assert found(monkeypatch)["NUMA"].remedy.startswith("numactl --interleave=all ")


def test_shared_memory_too_small_for_the_workers_is_broken(monkeypatch):
    """Docker gives 64 MiB; four workers, each two batches ahead, need 64 bytes per id."""
    monkeypatch.setattr(f"{FINDINGS}.shutil.disk_usage", lambda path: type("Usage", (), {"free": 64 * 2**20}))
    assert found(monkeypatch, batch=2**20, cores=lambda: 4.0)["/dev/shm"].level == "ok"
    each = found(monkeypatch, batch=2**20 + 1)["/dev/shm"]
    assert each.level == "broken"
    assert "64.0 MiB free; 4 workers of a DataLoader need 64.0 MiB for batches of 1,048,577 ids" in each.says
    assert each.remedy.startswith("docker run --shm-size=1g ")


def test_memory_says_whose_limit_it_is(monkeypatch):
    machine = {"available_bytes": lambda: GIB, "physical_bytes": lambda: 2 * GIB}
    assert found(monkeypatch, group_bytes=lambda: None, **machine)["memory"].says == "1.0 GiB free of 2.0 GiB"
    assert found(monkeypatch, group_bytes=lambda: GIB)["memory"].says.endswith("all that the container's limit leaves")


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "said"),
    [
        (None, "13.0", "ok", "no device"),
        ("550.54", None, "broken", "torch was built without CUDA"),
        ("470.82", "13.0", "broken", "driver 470.82 may be too old for CUDA 13.0"),
    ],
)
def test_a_gpu_that_torch_does_not_see(monkeypatch, driver, cuda, level, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    each = found(monkeypatch, driver_version=lambda: driver)["GPU"]
    assert each.level == level
    assert said in each.says
    assert bool(each.remedy) == (level == "broken")


def test_with_a_gpu_cupy_kernels_and_locked_memory_are_looked_at(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernels = {"CUDA kernels": "none: the kernels cannot be compiled with NVRTC: libnvrtc.so.13 is missing"}
    monkeypatch.setattr(f"{FINDINGS}.kernels.capabilities", lambda: kernels)
    machine = {"driver_version": lambda: "580.65", "installed_cupys": lambda: ["cupy-cuda12x"]}
    seen = found(monkeypatch, lockable_bytes=lambda: 2**16, **machine)
    assert seen["CuPy"].level == "broken"
    assert "pip install 'cupy-cuda13x" in seen["CuPy"].remedy
    assert "CUDA kernels" not in seen  # CuPy is the reason
    assert seen["locked memory"].remedy.startswith("ulimit -l unlimited")
    seen = found(monkeypatch, installed_cupys=lambda: ["cupy-cuda13x"], lockable_bytes=lambda: None)
    assert seen["CUDA kernels"].level == "broken"
    assert "locked memory" not in seen
    kernels["CUDA kernels"] = "fatbin"
    assert found(monkeypatch)["CUDA kernels"] == ("ok", "CUDA kernels", "fatbin", "")


@pytest.mark.parametrize(
    ("kind", "rate", "level"),
    [("ext4", 1e5, "ok"), ("ext4", 100, "slow"), ("tmpfs", 1e6, "slow"), ("nfs4", 1e5, "slow"), ("overlay", 1e5, "ok")],
)
def test_file_systems_and_slow_disks(monkeypatch, tmp_path, kind, rate, level):
    monkeypatch.setattr("speedswap._machine.file_system", lambda path: kind)
    each = doctor.of_disk(tmp_path, rate, "O_DIRECT in blocks of 512 bytes")
    assert each.level == level
    assert bool(each.remedy) == (level != "ok")


# ---- bytes, places, code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "nadam", "rmsprop"])
@pytest.mark.parametrize("dim", [1, 7, 128])
def test_a_rows_bytes_are_those_of_a_trained_table(optimizer, dim):
    items = speedswap.Embedding(1000, dim, storage="pageable")
    stepping = {"nadam": torch.optim.NAdam, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD}.get(optimizer)
    stepping = stepping or getattr(torch.optim, optimizer.title())
    stepping = stepping(items.parameters())
    items(torch.tensor([3, 5])).sum().backward()
    stepping.step()
    assert TableSpec(1000, dim, optimizer, 10).record_bytes() * 1000 == items.table.nbytes


def test_different_rows_of_a_batch():
    assert distinct(1, 5) == 1.0
    assert distinct(2, 2) == pytest.approx(1.5)
    drawn = [len(torch.randint(1000, (700,)).unique()) for _ in range(50)]
    assert distinct(1000, 700) == pytest.approx(sum(drawn) / 50, rel=0.02)


def advised(monkeypatch, tmp_path, rows, memory, disk, rates=RATES, near=None):
    monkeypatch.setattr("speedswap.apps.doctor.places.available_bytes", lambda: memory)
    monkeypatch.setattr("speedswap.apps.doctor.places.cache_bytes_for", lambda nbytes, asked: nbytes // 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (near, near))
    usage = type("Usage", (), {"free": disk})
    monkeypatch.setattr("speedswap.apps.doctor.places.shutil.disk_usage", lambda path: usage)
    return {each.name: each for each in estimate(TableSpec(rows, 8, "adam", 1), rates, tmp_path)}


def best(options) -> str:
    return TableAdvice(TableSpec(1000, 8, "adam", 1), RATES, [*options.values()]).best.name


def code_of(options) -> str:
    return lines([TableAdvice(TableSpec(1000, 8, "adam", 1), RATES, [*options])])


def test_the_first_place_that_fits_is_recommended(monkeypatch, tmp_path):
    """A table of 100,000 bytes: 0.8 of memory is for it, and three times as much has to be free on a disk."""
    on_gpu = Rates(**{**vars(RATES), "to_gpu": 1e7, "from_gpu": 1e7})
    assert best(advised(monkeypatch, tmp_path, 1000, 10**6, 10**6, on_gpu, near=125_000)) == "device"
    assert best(advised(monkeypatch, tmp_path, 1000, 10**6, 10**6, on_gpu, near=124_999)) == "pinned"
    assert best(advised(monkeypatch, tmp_path, 1000, 125_000, 10**6)) == "pageable"
    assert best(advised(monkeypatch, tmp_path, 1000, 124_999, 300_000)) == "disk"
    options = advised(monkeypatch, tmp_path, 1000, 50_000, 299_999)
    assert best(options) == "ranks"
    assert options["ranks"].why.startswith("3 machines ")


def test_a_steps_time_is_added_up_from_the_rates(monkeypatch, tmp_path):
    """One row of 100 bytes: 1 ms by itself, 0.1 ms read and 0.05 ms written in memory."""
    options = advised(monkeypatch, tmp_path, 1000, 10**6, 10**6)
    assert options["pageable"].seconds == pytest.approx(1.15e-3)
    # Three quarters are not in the cache: 2 ms to read, 5 ms to write one and a half times.
    assert options["disk"].seconds == pytest.approx(1.15e-3 + 0.75 * 7e-3)
    on_gpu = Rates(**{**vars(RATES), "to_gpu": 1e5, "from_gpu": 5e4})
    options = advised(monkeypatch, tmp_path, 1000, 10**6, 10**6, on_gpu, near=10**6)
    assert options["device"].seconds == pytest.approx(1e-3)
    assert options["pinned"].seconds == pytest.approx(1e-3 + 3e-3)
    assert options["pageable"].seconds == pytest.approx(1.15e-3 + 3e-3)


@pytest.mark.filterwarnings("ignore:SW405")
@pytest.mark.parametrize("name", ["device", "pinned", "pageable", "disk"])
def test_the_lines_run_as_printed(monkeypatch, tmp_path, name):
    (tmp_path / 'it\'s "here"').mkdir()
    (tmp_path / 'it\'s "here"' / "items").mkdir()  # taken
    on_gpu = Rates(**{**vars(RATES), "to_gpu": 1e5, "from_gpu": 5e4})
    options = advised(monkeypatch, tmp_path / 'it\'s "here"', 1000, 10**6, 10**6, on_gpu, near=10**6)
    monkeypatch.undo()
    train(code_of([options[name]]))


def test_the_line_for_ranks_runs_as_printed(monkeypatch, tmp_path):
    code = code_of(advised(monkeypatch, tmp_path, 1000, 50_000, 0).values())
    monkeypatch.undo()
    assert "speedswap.Ranks()" in code
    assert "torchrun" in code
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        train(code)
    finally:
        dist.destroy_process_group()


def train(code: str) -> None:
    made: dict = {}
    exec(code, made)
    items, optimizer = made["items"], made["optimizer"]
    before = items.read(torch.tensor([7]))
    items(torch.tensor([7])).sum().backward()
    optimizer.step()
    assert not torch.equal(items.read(torch.tensor([7])), before)
    assert len(items.table) == 1000
    items.table.close()


# ---- the command ----------------------------------------------------------------------------------------------------


def test_json_has_everything(short, tmp_path, capsys):
    status = main(["doctor", "--rows", "1e3", "--dim", "16", "--batch", "100", "--path", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == any(each["level"] == "broken" for each in report["findings"])
    (table,) = report["tables"]
    assert table.items() >= {"rows": 1000, "dim": 16, "optimizer": "adam", "batch": 100, "bytes": 192_000}.items()
    assert report["rates"]["record_bytes"] == 192
    assert all(report["rates"][name] > 0 for name in ("gather", "scatter", "reads", "writes"))
    assert [each["name"] for each in table["places"]] == ["device", "pinned", "pageable", "disk", "ranks"]
    assert table["recommended"] in ("device", "pinned", "pageable")
    assert table["recommended"].title() in report["code"]
    assert not list(tmp_path.iterdir())  # the sample is gone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_a_gpu_its_links_and_its_memory_count(short, tmp_path, capsys):
    main(["doctor", "--rows", "1e3", "--dim", "16", "--batch", "100", "--path", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"GPU", "CUDA kernels"} <= {each["what"] for each in report["findings"]}
    assert all(report["rates"][name] > 0 for name in ("to_gpu", "from_gpu", "lookup_seconds"))
    (table,) = report["tables"]
    seconds = {each["name"]: each["seconds"] for each in table["places"]}
    assert table["recommended"] == "device"
    assert seconds["device"] < seconds["pinned"] < seconds["pageable"] <= seconds["disk"]


def test_report_fits_80_columns_and_ends_with_the_lines(short, tmp_path, capsys):
    main(["doctor", "--rows", "1000", "--dim", "16", "--path", str(tmp_path)])
    *report, last, code, optimizer = capsys.readouterr().out.splitlines()
    assert not [line for line in report if len(line) > 80 and "→" not in line]
    assert last == "import speedswap, torch"
    assert code.startswith("items = speedswap.Embedding(1_000, 16, storage=speedswap.")
    assert optimizer == "optimizer = torch.optim.Adam(items.parameters())"


def test_without_rows_there_is_no_advice(short, tmp_path, capsys):
    main(["doctor", "--path", str(tmp_path)])
    assert "import speedswap" not in capsys.readouterr().out


MODEL = """
import speedswap, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(300_000, 4)
        self.items = nn.EmbeddingBag(100_000, 4, dtype=torch.bfloat16)
        self.words = speedswap.Embedding(200_000, 4)
        self.kinds = nn.Embedding(99_999, 4)

class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 300_000, bias=False)
        self.head.weight = self.users.weight

def small():
    return nn.Embedding(10, 4)

def far_too_large():
    return nn.Embedding(10**12, 4)

def missing():
    pass
"""


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A folder with the models of a user's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.modules", {**sys.modules})
    (tmp_path / "my_models.py").write_text(MODEL)
    return importlib.import_module


@pytest.mark.parametrize("where", ["my_models", "my_models.py"])
def test_each_embedding_of_a_model_has_its_place_and_the_lines_convert_it(short, model, where, capsys):
    main(["doctor", "--model", f"{where}:Model", "--batch", "100", "--optimizer", "sgd", "--json"])
    report = json.loads(capsys.readouterr().out)
    tables = {each["name"]: each for each in report["tables"]}
    assert list(tables) == ["items", "words", "users"]  # by their bytes
    assert [each["bytes"] for each in tables.values()] == [100_000 * 8, 200_000 * 16, 300_000 * 16]
    assert all(next(place for place in each["places"] if place["fits"])["seconds"] for each in tables.values())
    assert "# words: storage=speedswap." in report["code"]
    made = {"model": model("my_models").Model()}
    exec(report["code"], made)
    assert isinstance(made["model"].items, speedswap.EmbeddingBag)
    assert isinstance(made["model"].users, speedswap.Embedding)
    assert type(made["model"].kinds) is torch.nn.Embedding


def test_a_models_report_fits_80_columns(short, model, capsys):
    assert main(["doctor", "--model", "my_models:Model"]) == 0
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if len(line) > 80 and "→" not in line]
    assert re.search(r"^  users +300,000 × 4 +0\.0 GiB  \w+ +about ", out, flags=re.MULTILINE)


def test_what_stands_against_a_conversion_is_said(short, model, capsys):
    assert main(["doctor", "--model", "my_models:Tied", "--json"]) == 1
    (finding,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["what"] == "model")
    assert "users: its weight is tied to 'head.weight'" in finding["says"]
    assert "skip=[names]" in finding["remedy"]


def test_a_model_without_large_embeddings_needs_no_places(short, model, capsys):
    main(["doctor", "--model", "my_models:small"])
    out = capsys.readouterr().out
    assert "0 embeddings of 100,000 rows or more" in out
    assert "import speedswap" not in out


def test_a_model_larger_than_memory_is_not_built(short, model, capsys):
    main(["doctor", "--model", "my_models:far_too_large", "--optimizer", "sgd", "--json"])
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["bytes"] == 16 * 10**12


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_models", "give module:function"),
        ("my_models:", "give module:function"),
        ("no_such_module:Model", "No module named 'no_such_module'"),
        ("my_models.py:nothing", "has no attribute 'nothing'"),
        ("my_models:missing", "which returns a torch.nn.Module, not NoneType"),
    ],
)
def test_a_model_that_is_none_is_one_line(short, model, target, said, capsys):
    assert main(["doctor", "--model", target]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_tables_share_their_places(monkeypatch, tmp_path):
    """Three tables of 100,000 bytes, of which two fit into memory: the last has a place on the disk."""
    monkeypatch.setattr(Rates, "measured", lambda spec, folder: RATES)
    advised(monkeypatch, tmp_path, 1, 250_000, 10**6)
    specs = [TableSpec(rows, 8, "adam", 1, name=f"t{rows}") for rows in (1002, 1000, 998)]
    tables = advise(specs, tmp_path)
    assert [(each.spec.name, each.best.name) for each in tables] == [
        ("t998", "pageable"),
        ("t1000", "pageable"),
        ("t1002", "disk"),
    ]
    assert tables[2].best.storage == f"speedswap.Disk({str(tmp_path / 't1002')!r})"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "many"], "rows is 'many': give a whole number, such as 100000000 or 1e8"),
        (["--rows", "1e999"], "rows is '1e999': give a whole number"),
        (["--rows", "1.5e0"], "rows is '1.5e0': give a whole number"),
        (["--rows", "1e20"], "rows is 100000000000000000000: give a whole number of at most"),
        (["--rows", "0"], "rows is 0: give a whole number of 1 or more"),
        (["--rows", "-5"], "rows is -5: give a whole number of 1 or more"),
        (["--dim", "1e9"], "dim is 1000000000: give a whole number of at most 65,536"),
        (["--batch", "nan"], "batch is 'nan': give a whole number"),
        (["--optimizer", "adamant"], "optimizer is 'adamant': give one of "),
        (["--optimizer", "lbfgs"], "LBFGS"),
        (["--optimizer", "sparse-adam"], "SparseAdam"),
    ],
)
def test_a_wrong_argument_is_one_line(short, words, said, capsys):
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_path_that_is_none_is_broken_and_the_rest_is_said(short, tmp_path, capsys):
    assert main(["doctor", "--path", str(tmp_path / "none"), "--rows", "10"]) == 1
    out = capsys.readouterr().out
    assert re.search("^broken  disk ", out, flags=re.MULTILINE)
    assert "→ give a directory that exists" in out
    assert "import speedswap" in out


def test_a_full_disk_is_not_measured(short, monkeypatch, tmp_path, capsys):
    usage = type("Usage", (), {"free": 4 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    main(["doctor", "--path", str(tmp_path), "--batch", "1"])
    assert "4.0 MiB free are too few to measure" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("dim", [1, 4000])
def test_rows_of_every_size_are_read_from_the_disk(short, monkeypatch, tmp_path, dim):
    """However slow the disk: more is written than the cache holds."""
    monkeypatch.setattr("speedswap.apps.doctor.rates._WRITE_SECONDS", 0.0)
    assert Rates.measured(TableSpec(100, dim, "adam", 10), tmp_path).reads > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_without_the_right_to_write_is_broken(short, tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main(["doctor", "--path", str(tmp_path)]) == 1
    assert "cannot be written to" in capsys.readouterr().out


def test_a_current_directory_without_the_right_to_write_is_not_broken(short, monkeypatch, capsys):
    monkeypatch.chdir("/proc")
    main(["doctor", "--rows", "1000"])
    out = capsys.readouterr().out
    assert re.search("^slow    disk ", out, flags=re.MULTILINE)
    assert "no directory to write to" in out


# ---- what it estimates ----------------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize(("optimizer", "dim"), [("sgd", 128), ("adam", 64)])
@pytest.mark.parametrize("place", ["pageable", "disk"])
def test_estimates_are_those_of_a_measured_step(tmp_path, optimizer, dim, place):
    """Within a factor of two on 2 GiB in memory, of three on half a GiB on a disk, of which an eighth is cached."""
    record = TableSpec(1, dim, optimizer, 1).record_bytes()
    spec = TableSpec((2**31 if place == "pageable" else 2**29) // record, dim, optimizer, 32_768)
    cache = spec.rows * record // 8
    storage = "pageable" if place == "pageable" else speedswap.Disk(tmp_path / "items", cache_bytes=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speedswap.apps.doctor.places.cache_bytes_for", lambda nbytes, asked: cache)
        patch.setattr("speedswap.apps.doctor.places._TIMES_ON_DISK", 0)  # however little of the disk is free
        estimated = {each.name: each for each in estimate(spec, Rates.measured(spec, tmp_path), tmp_path)}
    items, stepping = spec.training(spec.rows, storage, "cpu")
    values = torch.rand(8192, dim)
    for start in range(0, spec.rows, len(values)):
        items.table.write(start, values[: spec.rows - start])
    times = []
    for _ in range(40):
        ids = torch.randint(spec.rows, (spec.batch,))
        begin = time.perf_counter()
        items(ids).sum().backward()
        stepping.step()
        stepping.zero_grad()
        times.append(time.perf_counter() - begin)
    items.table.close()
    measured = sum(times[10:]) / 30
    factor = 2 if place == "pageable" else 3
    assert measured / factor < estimated[place].seconds < factor * measured, (measured, estimated[place].seconds)

"""``speedswap doctor``: findings with remedies, bytes as tables have them, places that fit, lines that run."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import speedswap
from speedswap import _machine
from speedswap.apps import doctor
from speedswap.apps.doctor import Finding, Rates, TableAdvice, TableSpec, advise, estimate, examine, lines, measured
from speedswap.cli import main

GIB = 2**30
DOCTOR = "speedswap.apps.doctor"
RATES = Rates(768, {"pageable": 1e-3}, reads=500.0, writes=1e5)
ON_GPU = RATES._replace(step_seconds={"device": 1e-4, "pinned": 5e-4, "pageable": 1e-3})
SPEC = TableSpec(1000, 64, "adam", 1)  # 768,000 bytes


@pytest.fixture
def short(monkeypatch):
    """Samples that take a tenth of a second; rates are not checked."""
    monkeypatch.setattr("speedswap.apps.bench.measure.REST_SECONDS", 0.0)
    for name, value in {
        "_MEMORY_SAMPLE": 2**20,
        "_DISK_SAMPLE": 2**20,
        "_LEAST_FREE": 2**22,
        "_CACHE_BYTES": 2**16,
        "_READ_SECONDS": 0.01,
    }.items():
        monkeypatch.setattr(f"{DOCTOR}.{name}", value)


def found(monkeypatch, nbytes=0, **machine) -> dict[str, Finding]:
    """Return the findings of a machine of which some facts are others."""
    for name, value in machine.items():
        owner = "speedswap._machine" if hasattr(_machine, name) else DOCTOR
        monkeypatch.setattr(f"{owner}.{name}", value)
    return {each.what: each for each in examine(nbytes)}


# ---- findings -------------------------------------------------------------------------------------------------------


def test_only_what_is_not_well_has_a_remedy(monkeypatch):
    for each in found(monkeypatch).values():
        assert bool(each.remedy) == (each.level != "ok")


def test_more_threads_than_a_containers_cores_are_slow(monkeypatch):
    monkeypatch.setattr(f"{DOCTOR}.kernels.get_num_threads", lambda: 8)
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
    assert found(monkeypatch, _NODES=tmp_path)["NUMA"].level == "ok"
    (tmp_path / "node1").mkdir()
    each = found(monkeypatch)["NUMA"]
    assert (each.level, each.says) == ("slow", "nodes of memory: 2: that of another node is slower")
    assert each.remedy.startswith("numactl --interleave=all ")


def test_memory_says_whose_limit_it_is(monkeypatch):
    machine = {"available_bytes": lambda: GIB, "physical_bytes": lambda: 2 * GIB}
    assert found(monkeypatch, group_bytes=lambda: None, **machine)["memory"].says == "1.0 GiB free of 2.0 GiB"
    assert found(monkeypatch, group_bytes=lambda: GIB)["memory"].says.endswith("all that the container's limit leaves")


def test_memory_that_the_tables_do_not_fit_in_is_slow(monkeypatch):
    assert found(monkeypatch, GIB, available_bytes=lambda: GIB)["memory"].level == "ok"
    each = found(monkeypatch, GIB + 1)["memory"]
    assert each.level == "slow"
    assert each.says.endswith("the tables take 1.0 GiB")
    assert each.remedy.startswith("stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16 ")


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
    monkeypatch.setattr(f"{DOCTOR}.kernels.capabilities", lambda: kernels)
    machine = {"driver_version": lambda: "580.65", "installed_cupys": lambda: ["cupy-cuda12x"]}
    seen = found(monkeypatch, lockable_bytes=lambda: 2**16, **machine)
    assert seen["CuPy"].level == "broken"
    assert "pip install 'cupy-cuda13x" in seen["CuPy"].remedy
    assert "CUDA kernels" not in seen  # CuPy is the reason
    assert seen["locked memory"].remedy.startswith("ulimit -l unlimited")
    seen = found(monkeypatch, installed_cupys=lambda: ["cupy-cuda13x"], lockable_bytes=lambda: None)
    assert seen["CUDA kernels"].level == "broken"
    assert seen["locked memory"].level == "ok"
    kernels["CUDA kernels"] = "fatbin"
    assert found(monkeypatch)["CUDA kernels"] == ("ok", "CUDA kernels", "fatbin", "")


@pytest.mark.parametrize(
    ("kind", "rate", "level"),
    [("ext4", 1e5, "ok"), ("ext4", 100, "slow"), ("tmpfs", 1e6, "slow"), ("nfs4", 1e5, "slow"), ("overlay", 1e5, "ok")],
)
def test_file_systems_and_slow_disks(monkeypatch, tmp_path, kind, rate, level):
    monkeypatch.setattr("speedswap._machine.file_system", lambda path: kind)
    each = doctor.of_disk(tmp_path, rate)
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
    assert TableSpec(1000, dim, optimizer, 10).nbytes == items.table.nbytes


def advised(monkeypatch, tmp_path, memory=10**7, disk=10**7, rates=RATES, near=None, spec=SPEC):
    """Return the places of a table by name, on a machine with some bytes free."""
    monkeypatch.setattr("speedswap._machine.available_bytes", lambda: memory)
    monkeypatch.setattr(f"{DOCTOR}.cache_bytes_for", lambda nbytes, asked: nbytes // 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (near, near))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": disk}))
    return {each.name: each for each in estimate(spec, rates, tmp_path, Counter())}


def best(options) -> str:
    return TableAdvice(SPEC, [*options.values()]).best.name


def test_the_first_place_that_fits_is_recommended(monkeypatch, tmp_path):
    """A table takes at most 0.8 of memory, and three times its bytes have to be free on a disk."""
    assert best(advised(monkeypatch, tmp_path, rates=ON_GPU, near=960_000)) == "device"
    assert best(advised(monkeypatch, tmp_path, rates=ON_GPU, near=959_999)) == "pinned"
    assert best(advised(monkeypatch, tmp_path, 960_000)) == "pageable"
    assert best(advised(monkeypatch, tmp_path, 959_999, 2_304_000)) == "disk"
    options = advised(monkeypatch, tmp_path, 400_000, 2_303_999)
    assert best(options) == "ranks"
    assert options["ranks"].why.startswith("3 machines ")


def test_what_is_needed_is_given_as_a_sum(monkeypatch, tmp_path):
    """A row of 128 float32 takes 512 bytes, and Adam's two moments twice that."""
    spec = TableSpec(10**8, 128, "adam", 65_536)
    options = advised(monkeypatch, tmp_path, 2**30, 2**30, spec=spec)
    assert options["pageable"].why == "1.25 × 143.0 = 178.8 GiB needed, 1.0 free"
    assert options["disk"].why == "3 × 143.0 = 429.1 GiB needed, 1.0 free"
    size, *_ = doctor._of_places(TableAdvice(spec, [*options.values()]))
    assert size.strip().replace("\n", " ") == (
        "100,000,000 rows × (512 bytes of weights + 1,024 of adam's state) = 143.0 GiB; a step of 65,536 ids:"
    )


def test_without_a_gpu_there_are_no_places_for_it(monkeypatch, tmp_path):
    assert list(advised(monkeypatch, tmp_path)) == ["pageable", "disk", "ranks"]


def test_a_steps_time_is_that_of_its_ids(monkeypatch, tmp_path):
    options = advised(monkeypatch, tmp_path, rates=ON_GPU, near=10**7, spec=replace(SPEC, batch=20))
    seconds = {name: place.seconds for name, place in options.items()}
    assert [seconds[name] for name in ("device", "pinned", "pageable")] == pytest.approx([2e-3, 1e-2, 2e-2])
    assert seconds["ranks"] is None


def test_rows_that_no_cache_has_are_read_and_written(monkeypatch, tmp_path):
    """Three quarters of them: 2 ms per row to read, and 11.52 ms to write 768 bytes one and a half times."""
    for batch in (1, 700):
        place = advised(monkeypatch, tmp_path, spec=replace(SPEC, batch=batch))["disk"]
        drawn = sum(len(torch.randint(1000, (batch,)).unique()) for _ in range(50)) / 50
        assert place.seconds == pytest.approx(1e-3 * batch + drawn * 0.75 * 13.52e-3, rel=0.02)


@pytest.mark.parametrize(("dim", "times", "reads"), [(4, 1 / 3, 1), (32, 1 / 2, 1), (128, 2, 1), (1024, 16, 3)])
def test_times_of_other_widths_are_scaled(monkeypatch, tmp_path, dim, times, reads):
    """Rows below 256 bytes take as long in a step, and those below 4 KiB to read."""
    options = advised(monkeypatch, tmp_path, 10**9, 10**9, spec=replace(SPEC, dim=dim))
    assert options["pageable"].seconds == pytest.approx(times * 1e-3)
    own = 2e-3 * reads + 1.5 * 12 * dim / 1e5
    assert options["disk"].seconds == pytest.approx(times * 1e-3 + 0.75 * own)


@pytest.mark.filterwarnings("ignore:SW405")
@pytest.mark.parametrize("name", ["device", "pinned", "pageable", "disk"])
def test_the_lines_run_as_printed(monkeypatch, tmp_path, name):
    (tmp_path / 'it\'s "here"').mkdir()
    options = advised(monkeypatch, tmp_path / 'it\'s "here"', rates=ON_GPU, near=10**7)
    monkeypatch.undo()
    train(lines([TableAdvice(SPEC, [options[name]])]))


def test_the_line_for_ranks_runs_as_printed(monkeypatch, tmp_path):
    code = lines([TableAdvice(SPEC, [*advised(monkeypatch, tmp_path, 400_000, 0).values()])])
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
    assert all(rate > 0 for rate in (*report["rates"]["step_seconds"].values(), report["rates"]["reads"]))
    assert [each["name"] for each in table["places"]][-3:] == ["pageable", "disk", "ranks"]
    assert table["recommended"] in ("device", "pinned", "pageable")
    assert table["recommended"].title() in report["code"]
    assert not list(tmp_path.iterdir())  # the sample is gone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_a_gpu_its_places_and_its_memory_count(short, tmp_path, capsys):
    main(["doctor", "--rows", "1e3", "--dim", "16", "--batch", "100", "--path", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"GPU", "CUDA kernels"} <= {each["what"] for each in report["findings"]}
    assert all(report["rates"]["step_seconds"][name] > 0 for name in ("device", "pinned", "pageable"))
    (table,) = report["tables"]
    seconds = {each["name"]: each["seconds"] for each in table["places"]}
    assert table["recommended"] == "device"
    assert seconds["pageable"] <= seconds["disk"]


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
from speedswap import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
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

class Collections(nn.Module):
    def __init__(self):
        super().__init__()
        rows = {"user": 300_000, "item": 200_000, "kind": 10}
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(name=name, num_embeddings=each, embedding_dim=4) for name, each in rows.items()]
        )
        self.words = EmbeddingCollection(
            [EmbeddingConfig(name="word", num_embeddings=100_000, embedding_dim=8, dtype=torch.bfloat16)]
        )
        self.plain = nn.ModuleDict({"page": nn.EmbeddingBag(150_000, 16)})  # as TorchRec's collections have them

def in_memory():
    with torch.device("cpu"):
        return Collections()

small = nn.Sequential(nn.Embedding(10, 4))

class WithArguments(nn.Module):
    def __init__(self, rows):
        super().__init__()

def needs_numbers():
    return nn.Embedding(int(torch.ones(1)), 4)

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
    (tmp_path / "broken.py").write_text("def Model(:")
    (tmp_path / "script.py").write_text("import sys\nprint('loading')\nsys.exit(2)")
    return importlib.import_module


@pytest.mark.filterwarnings("ignore:SW405")
@pytest.mark.parametrize("build", ["Collections", "in_memory"])
def test_each_table_of_a_collection_has_its_place(short, model, build, capsys):
    main(["doctor", "--model", f"my_models:{build}", "--batch", "100", "--json"])
    report = json.loads(capsys.readouterr().out)
    tables = {each["name"]: each["bytes"] for each in report["tables"]}
    assert tables == {
        "words.embeddings.word": 100_000 * 48,
        "bags.embedding_bags.item": 200_000 * 48,
        "bags.embedding_bags.user": 300_000 * 48,
        "plain.page": 150_000 * 192,
    }
    assert "# bags.embedding_bags.user: storage=speedswap." in report["code"]
    assert "    'plain.page': speedswap." in report["code"]
    assert report["code"].count("    '") == 1  # collections are not converted
    assert "4 of 5 tables have 100,000 rows or more" in next(
        each["says"] for each in report["findings"] if each["what"] == "model"
    )


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
    assert re.search(r"^ +300,000 × 4 +0\.0 GiB  \w+ +about .* ms  users$", out, flags=re.MULTILINE)
    assert re.search(r"^ +in all +0\.0 GiB +about .* ms$", out, flags=re.MULTILINE)
    assert "Measured with rows of 48 bytes (4 numbers and the state of adam):" in out
    assert "Scaled from these: rows of 24 bytes." in out


def test_what_stands_against_a_conversion_is_said(short, model, capsys):
    assert main(["doctor", "--model", "my_models:Tied", "--json"]) == 1
    (finding,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["what"] == "model")
    assert "users: its weight is tied to 'head.weight'" in finding["says"]
    assert "skip=[names]" in finding["remedy"]


def test_a_model_without_large_embeddings_needs_no_places(short, model, capsys):
    main(["doctor", "--model", "my_models:small"])
    out = capsys.readouterr().out
    assert "0 of 1 tables have 100,000 rows or more; convert leaves smaller ones" in " ".join(out.split())
    assert "import speedswap" not in out


def test_a_model_larger_than_memory_is_not_built(short, model, capsys):
    main(["doctor", "--model", "my_models:far_too_large", "--optimizer", "sgd", "--json"])
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["bytes"] == 16 * 10**12


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_models", "Empty module name; give module:function"),
        ("my_models:", "my_models has no ''; give module:function"),
        ("no_such_module:Model", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("no_such_file.py:Model", "FileNotFoundError: "),
        ("broken.py:Model", "SyntaxError: "),
        ("script.py:Model", "SystemExit in script.py, line 3: 2; give"),
        ("my_models.py:nothing", "my_models.py has no 'nothing'"),
        ("my_models:missing", "missing returns a NoneType"),
        ("my_models:nn", "TypeError: 'module' object is not callable"),
        ("my_models:WithArguments", "missing 1 required positional argument: 'rows'; give"),
        ("my_models.py:needs_numbers", "RuntimeError in my_models.py, line "),
    ],
)
def test_a_model_that_is_none_is_one_line(short, model, target, said, capsys):
    assert main(["doctor", "--model", target]) == 2
    out, err = capsys.readouterr()
    assert (out, err.removeprefix("loading\n").count("\n")) == ("", 1)
    assert said in err


def test_tables_share_their_places(monkeypatch, tmp_path):
    """Three tables of about 768,000 bytes, of which two fit into memory: the last has a place on the disk."""
    seen = []
    monkeypatch.setattr(f"{DOCTOR}.measured", lambda spec, folder: seen.append(spec) or RATES)
    advised(monkeypatch, tmp_path, 2_000_000)
    specs = [TableSpec(rows, 64, "adam", 1, name=f"t{rows}") for rows in (1002, 1000, 998)]
    tables, rates = advise(specs, tmp_path)
    assert [(each.spec.name, each.best.name) for each in tables] == [
        ("t998", "pageable"),
        ("t1000", "pageable"),
        ("t1002", "disk"),
    ]
    assert tables[2].best.storage == f"speedswap.Disk({str(tmp_path / 't1002')!r})"
    assert (seen, rates) == ([specs[0]], RATES)  # the largest is measured


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
        (["--dim", "0"], "dim is 0: give a whole number of 1 or more"),
        (["--rows", "1e18"], "rows is 1000000000000000000: give a whole number of at most"),
        (["--path", "/no/such"], "path is '/no/such': give a directory that exists"),
        (["--path", "/proc"], "path is '/proc', but /proc cannot be written to"),
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


def test_a_full_disk_is_one_line(short, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**21}))
    assert main(["doctor", "--path", str(tmp_path)]) == 2
    assert f"--path is {tmp_path}, with 2.0 MiB free: give one with 1 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("dim", [1, 4000])
def test_rows_of_every_size_are_read_from_the_disk(short, tmp_path, dim):
    assert measured(TableSpec(100, dim, "adam", 10), tmp_path).reads > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_without_the_right_to_write_is_one_line(short, tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main(["doctor", "--path", str(tmp_path)]) == 2
    assert "cannot be written to" in capsys.readouterr().err


# ---- what it estimates ----------------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize(("optimizer", "dim"), [("sgd", 128), ("adam", 64)])
@pytest.mark.parametrize("place", ["pageable", "disk"])
def test_estimates_are_those_of_a_measured_step(tmp_path, optimizer, dim, place):
    """Within a factor of two on 2 GiB in memory, of three on half a GiB on a disk, of which an eighth is cached."""
    record = TableSpec(1, dim, optimizer, 1).record_bytes
    spec = TableSpec((2**31 if place == "pageable" else 2**29) // record, dim, optimizer, 32_768)
    cache = spec.rows * record // 8
    storage = "pageable" if place == "pageable" else speedswap.Disk(tmp_path / "items", cache_bytes=cache)

    def estimated() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{DOCTOR}.cache_bytes_for", lambda nbytes, asked: cache)
            patch.setattr(f"{DOCTOR}._TIMES_ON_DISK", 0)  # however little of the disk is free
            found = {each.name: each for each in estimate(spec, measured(spec, tmp_path), tmp_path, Counter())}
        return found[place].seconds or 0.0

    before = estimated()
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
    took = sum(times[10:]) / 30
    factor = 2 if place == "pageable" else 3
    low, high = sorted([before, estimated()])  # what else the machine does may have changed
    assert low / factor < took < factor * high, (low, took, high)

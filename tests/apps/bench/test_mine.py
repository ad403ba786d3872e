"""``speedswap bench mine``: ids of every kind of file, one line for a mistake, and the sentence at the end."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from speedswap.apps.bench import measure, step
from speedswap.apps.bench.measure import IdBatch
from speedswap.apps.bench.step import Contestant, Ours, contestants, read_ids
from speedswap.apps.errors import BenchmarkError, WrongResultError
from speedswap.cli import main

IDS = [7, 0, 7, 2**40, 3]


@pytest.fixture
def few(monkeypatch):
    """A loop of a few steps, and no pauses between them."""
    monkeypatch.setattr(measure, "REST_SECONDS", 0.0)
    monkeypatch.setattr(step, "_OWN_STEPS", 4)
    monkeypatch.setattr(step, "_OWN_LOOPS", 1)


@pytest.fixture
def clicks(tmp_path):
    """A file of 1,000 ids below 50."""
    path = tmp_path / "clicks.txt"
    path.write_text("\n".join(map(str, np.random.default_rng(0).zipf(1.3, 1000) % 50)))
    return path


def written(path, kind):
    """Write the ids as a file of a kind."""
    if kind == "npy":
        with open(path, "wb") as file:  # np.save adds a suffix to a path
            np.save(file, np.array(IDS, np.uint64).reshape(5, 1))
    elif kind == "text":
        path.write_text("\ufeff7 0,7\n\n1099511627776\t3\n")
    elif kind == "gzip":
        path.write_bytes(gzip.compress(b"7\n0\n7\n1099511627776\n3"))
    else:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {"item": pa.array([7, 0, None, 7, 2**40, 3]), "price": pa.array([0.5] * 6)}
        parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", ["npy", "text", "gzip", "parquet"])
def test_ids_are_read_in_their_order(tmp_path, kind):
    assert read_ids(written(tmp_path / "ids", kind)).tolist() == IDS


@pytest.mark.parametrize("kind", ["npy", "text", "parquet"])
def test_only_the_first_ids_of_a_long_file_are_read(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(step, "_MOST_IDS", 3)
    assert read_ids(written(tmp_path / "ids", kind)).tolist() == IDS[:3]


def test_a_column_of_several_is_chosen(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "ids.parquet"
    parquet.write_table(pa.table({"user": [1, 2], "item": [3, 4], "name": ["a", "b"]}), path)
    assert read_ids(path, "item").tolist() == [3, 4]
    with pytest.raises(BenchmarkError, match=r"column of .*ids\.parquet is None: give one of user, item$"):
        read_ids(path)
    with pytest.raises(BenchmarkError, match=r"is 'name': give one of user, item$"):
        read_ids(path, "name")


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (
            b"1 2\n3,user_7\n",
            "the file of ids {} cannot be used (invalid literal for int() with base 10: 'user_7'): give",
        ),
        (b"1 2\n\xff\xfe\n", "the file of ids {} cannot be used"),
        (b"1.5", "'1.5'): give whole numbers"),
        (b"3 9223372036854775808", "give whole numbers of 64 bits"),
        (b"5\n6\n-1\n", "id 2 of {} is -1: leave out ids below 0"),
        (b"", "{} has no ids: give a file with whole numbers"),
        (b" \n,\n", "{} has no ids"),
        (b"\x93NUMPY and no more", "the file of ids {} cannot be used"),
        (b"PAR1 and no more", "the file of ids {} is not a whole Parquet file"),
        (b"\x1f\x8b and no more", "the file of ids {} is not a whole gzip file"),
        (None, "the file of ids {} cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, contents, said, capsys):
    path = tmp_path / "ids"
    if contents is not None:
        path.write_bytes(contents)
    assert main(["bench", "mine", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said.format(path) in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dim", "0"], "dim is 0"),
        (["--batch", "-3"], "batch is -3"),
        (["--optimizer", "adamw"], "optimizer is 'adamw': give one of sgd, adagrad, adam"),
        (["--column", "item"], "column is 'item', but .* is not Parquet: leave it out"),
        (["--plot", "x.png"], "give a file of ids for mine"),
        (["--folder", "."], "folder is '.'"),
    ],
)
def test_a_wrong_option_is_one_line(clicks, words, said, capsys):
    assert main(["bench", "mine", str(clicks), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(said, err)


@pytest.mark.parametrize("words", ["mine --dim 0 FILE", "--dim 0 mine FILE", "mine FILE --dim 0"])
def test_options_stand_anywhere(clicks, words, capsys):
    """Python 3.11's argparse refuses an optional argument that comes after an option."""
    assert main(["bench", *words.replace("FILE", str(clicks)).split()]) == 2
    assert capsys.readouterr().err.startswith("speedswap: --dim is 0")


@pytest.mark.parametrize("words", [["mine"], ["step", "ids.txt"]])
def test_a_file_of_ids_is_for_mine(words, capsys):
    assert main(["bench", *words]) == 2
    assert "speedswap bench mine IDS_FILE" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_all_are_timed_and_the_sentence_comes_last(few, clicks, tmp_path, optimizer, capsys):
    file = tmp_path / "figures.json"
    words = ["--dim", "8", "--batch", "128", "--optimizer", optimizer, "--json", str(file), "--device", "cpu"]
    assert main(["bench", "mine", str(clicks), *words]) == 0
    results = json.loads(file.read_text())["results"]
    assert results["workload"]["lookups"] == 128
    seconds = {name: one["seconds"] for name, one in results["trainers"].items()}
    assert {one["package"] for one in results["trainers"].values()} == {"speedswap", "torch"}
    assert [name for name in seconds if name.endswith("dense")]
    theirs = min(time for name, time in seconds.items() if name.startswith("torch"))
    assert results["times_faster"] == theirs / seconds["speedswap"]
    said = capsys.readouterr().out.split("saved")[0].rstrip().splitlines()[-1]
    assert said.startswith("on your machine, your ids: ")


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (1.0, "your ids: 3.1×"),
        (3.1, "your ids: 1.0×"),
        (5.0, "your ids: 0.62×, which is slower: torch's nn.Embedding suits them better"),
    ],
)
def test_the_sentence_compares_with_the_fastest_of_torchs(monkeypatch, clicks, ours, sentence, capsys):
    seconds = {"speedswap": ours, "torch SparseAdam": 3.1, "torch Adam, dense": 9.0}
    trainers = {name: {"package": name.split()[0], "seconds": each} for name, each in seconds.items()}
    trainers["torch on a train"] = {"package": "torch", "skipped": "9 GiB of memory are not free"}
    monkeypatch.setattr(step, "compare", lambda *words, **more: {"trainers": trainers, "time_over": {}})
    assert main(["bench", "mine", str(clicks)]) == 0
    out = capsys.readouterr().out
    assert "Compared with torch SparseAdam, the fastest of plain torch" in out
    assert out.endswith(f"{sentence}\n")


def test_ids_of_a_table_that_does_not_fit_are_numbered(few, tmp_path, capsys):
    path = tmp_path / "hashes.npy"
    np.save(path, np.array([2**62, 5, 2**61, 5] * 8))
    found = step.run_mine("cpu", path, column=None, dim=4, optimizer="sgd", batch=8)
    assert found["workload"]["rows"] == 3
    assert "ids up to 4,611,686,018,427,387,904 are numbered from 0 to 2" in capsys.readouterr().out


def test_a_table_that_does_not_fit_is_refused(clicks, monkeypatch):
    monkeypatch.setattr(step, "lacking", lambda nbytes: "0.1 GiB of memory are not free")
    with pytest.raises(BenchmarkError, match=r"a table of \d+ rows does not fit: 0.1 GiB .*; give a smaller dim"):
        step.run_mine("cpu", clicks, column=None, dim=4, optimizer="sgd", batch=8)


class Forgetful(Ours):
    """Looks up each id of a batch once, and so loses the gradients of the others."""

    def steps(self, batches, grad):
        once = [torch.unique(batch.host) for batch in batches]
        return super().steps([IdBatch(ids, ids) for ids in once], grad[: len(once[0])])


def test_trainers_are_verified_with_the_users_ids(monkeypatch):
    """One that is wrong only where an id is repeated is found out."""
    plan = step.StepPlan(50, 8, 50, 4, 1, {}, (), ())

    def compared(ids):
        return step.compare("sgd", "cpu", plan, [IdBatch(ids, ids)] * 4, [IdBatch(ids, ids)] * 3)

    mistaken = [*contestants("sgd", "cpu"), Contestant("forgetful", "other", partial(Forgetful, storage="pageable"))]
    monkeypatch.setattr(step, "contestants", lambda optimizer, device, dense=None: mistaken)
    monkeypatch.setattr(measure, "REST_SECONDS", 0.0)
    assert "seconds" in compared(torch.arange(50).repeat(2)[:50])["trainers"]["speedswap"]
    with pytest.raises(WrongResultError, match="forgetful trains"):
        compared(torch.arange(25).repeat(2))

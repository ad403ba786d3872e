"""Applications over ranks: the model equals one process's, and the first rank writes its results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import apps_scenarios as scenarios
import numpy as np
import pytest
import torch
from apps.dlrm.runs import text_of
from children import FORKED, torchrun
from rank_pool import RankPool

import speedswap
from speedswap.apps.dlrm import GeneratedSamples
from speedswap.cli import main

NCF = {"users": 60, "items": 50, "interactions": 800, "factors": 4, "layers": (8, 4), "test_negatives": 20, "seed": 3}
WORDS = {"generate": 40_000, "dim": 8, "epochs": 2, "sample": 0.0, "seed": 3, "batch": 500}
COMMAND = [*FORKED, Path(speedswap.__file__).with_name("__main__.py")]
CLICKS = {"generate": 2_000, "ids": 200, "dim": 4, "capacity": 1_000, "bottom": (8,), "top": (8,), "evaluate_every": 3}


@pytest.fixture(autouse=True)
def _one_thread():
    """Batches of a few rows gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        (2, {"batch": 101, "epochs": 2}),
        (3, {"batch": 2, "epochs": 1, "users": 9, "interactions": 25, "optimizer": "adagrad"}),
        (2, {"batch": 64, "epochs": 1, "model": "gmf", "storage": "disk"}),
    ],
    ids=["uneven shares", "empty shares", "without layers, on disk"],
)
def test_ncf_is_that_of_one_process(ranks: RankPool, tmp_path: Path, world_size: int, more: dict) -> None:
    """The losses of all shares add up to those of the batches; every rank has its rows, their state and its layers."""
    settings = {**NCF, **more, "scratch": tmp_path}
    expected = scenarios.train_ncf(None, **settings)
    found = ranks.run(scenarios.train_ncf, world_size, **settings)
    assert np.allclose(sum(np.array(each["losses"]) for each in found), expected["losses"], rtol=1e-6, atol=0)
    assert len(expected["losses"]) == expected["steps"]
    for each in found:
        assert np.allclose(each["epochs"], expected["epochs"], rtol=1e-6, atol=0)
        for ours, theirs in zip(each["columns"], expected["columns"], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6) for name in ours)
        assert all(
            np.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(each["layers"], expected["layers"], strict=True)
        )
    assert not list(tmp_path.glob("*/users"))


def test_signal_to_one_rank_ends_all_after_the_same_step_and_others_go_on(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks are ended in the second epoch; three go on from there, and one process with their last epoch."""
    settings = {**NCF, "batch": 64, "epochs": 3}
    expected = scenarios.train_ncf(None, **settings)
    begun = ranks.run(scenarios.train_ncf, 2, tmp_path, raise_at=12, **settings)
    assert [(each["steps"], each["interrupted"]) for each in begun] == [(12, True)] * 2
    more = ranks.run(scenarios.train_ncf, 3, tmp_path, raise_at=8, raised_by=0, resume=True, **settings)
    assert [(each["steps"], each["interrupted"]) for each in more] == [(8, True)] * 3
    rest = scenarios.train_ncf(None, tmp_path, resume=True, **settings)
    assert rest["steps"] == expected["steps"] - 20
    assert np.allclose(rest["epochs"], expected["epochs"], rtol=1e-5, atol=0)
    assert np.allclose(rest["columns"][0]["weight"], expected["columns"][0]["weight"], rtol=1e-4, atol=1e-6)


def test_word2vec_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """Its pairs are the same, its losses and vectors but for the order of sums; the first rank writes all vectors."""
    one, three = tmp_path / "one", tmp_path / "three"
    one.mkdir()
    three.mkdir()
    expected = scenarios.train_word2vec(None, one, **WORDS)
    found = ranks.run(scenarios.train_word2vec, 3, three, **WORDS)
    assert [each["written"] for each in found] == ["written", None, None]
    for each in found:
        assert each["figures"] == expected["figures"]
        assert np.allclose(each["course"], expected["course"], rtol=1e-5, atol=0)
    (words, vectors), (ours, ours_vectors) = map(read_vectors, (one, three))
    assert words == ours
    assert np.allclose(vectors, ours_vectors, rtol=1e-3, atol=1e-5)


def test_word2vec_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """A signal to the second rank ends the run for both; one process goes on to the result of one alone."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = scenarios.train_word2vec(None, whole, **WORDS)
    begun = ranks.run(scenarios.train_word2vec, 2, parts, raise_at=5, **WORDS)
    assert [(each["steps"], each["figures"][3]) for each in begun] == [(5, True)] * 2
    rest = scenarios.train_word2vec(None, parts, **WORDS)
    assert rest["figures"] == expected["figures"]
    assert np.allclose(rest["course"], expected["course"], rtol=1e-5, atol=0)
    assert np.allclose(read_vectors(parts)[1], read_vectors(whole)[1], rtol=1e-3, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("world_size", "more"),
    [(3, {"batch": 250}), (2, {"batch": 1, "generate": 40, "holdout": 3, "storage": "disk"})],
    ids=["uneven shares", "empty shares, on disk"],
)
def test_dlrm_is_that_of_one_process(ranks: RankPool, tmp_path: Path, world_size: int, more: dict) -> None:
    """Every rank knows the ids, figures and predictions of the whole run."""
    settings = {**CLICKS, "scratch": tmp_path, **more}
    expected = scenarios.train_dlrm(None, **settings)
    for found in ranks.run(scenarios.train_dlrm, world_size, **settings):
        assert (found["known"], found["end"]) == (expected["known"], expected["end"])
        for name in ("curve", "evaluations", "tested"):
            assert np.allclose(found[name], expected[name], rtol=1e-5, atol=0, equal_nan=True), name
        assert np.allclose(found["predictions"], expected["predictions"], rtol=1e-3, atol=1e-5)
        for ours, theirs in zip(found["layers"], expected["layers"], strict=True):
            assert np.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_dlrm_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """A signal to the second of two ranks ends the run; three go on with its rows, ids and figures."""
    settings = {**CLICKS, "batch": 250}
    expected = scenarios.train_dlrm(None, **settings)
    begun = ranks.run(scenarios.train_dlrm, 2, tmp_path, raise_at=4, **settings)
    assert [each["end"] for each in begun] == [(4, 1_000, True)] * 2
    rest = ranks.run(scenarios.train_dlrm, 3, tmp_path, **settings)
    for found in rest:
        assert found["end"] == (expected["end"][0] - 4, expected["end"][1] - 1_000, False)
        assert found["known"] == expected["known"]
        for name in ("curve", "evaluations", "tested"):
            assert np.allclose(found[name], expected[name], rtol=1e-5, atol=0, equal_nan=True), name
        assert np.allclose(found["predictions"], expected["predictions"], rtol=1e-3, atol=1e-5)


def test_result_that_the_first_rank_cannot_write_is_an_error_of_all(ranks: RankPool) -> None:
    """The others do not wait for it, and the table stays usable."""
    found = ranks.run(scenarios.lead_and_fail, 3)
    assert found[0][0] == "no room"
    assert all("rank 0 failed" in error for error, _ in found[1:])
    assert len({tuple(map(tuple, row)) for _, row in found}) == 3


def test_ranks_agree_and_share(ranks: RankPool) -> None:
    """Every rank has the others' numbers, negative ones too, and shares are the whole."""
    found = ranks.run(scenarios.agree, 3)
    assert [each[:2] for each in found] == [([-1, 0, 1], [1.5, 3.0])] * 3
    assert [each[2] for each in found] == [(0, 2), (2, 4), (4, 7)]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ncf", "--optimizer", "none"], r"speedswap: --optimizer is 'none': give one of .*\n"),
        (["ncf", "--nothing"], r"usage: (.|\n)*error: unrecognized arguments: --nothing\n"),
        (["word2vec", "nowhere.txt", "--device", "cpu", "--output", "nowhere"], r"speedswap: corpus nowhere.txt .*\n"),
    ],
    ids=["a setting", "an option", "a file"],
)
def test_ranks_say_once_why_they_end(ranks: RankPool, words: list[str], line: str) -> None:
    """All of them find the mistake, and one reports it."""
    found = ranks.run(scenarios.run_command, 5, *words)
    assert [status for status, _ in found] == [2] * 5
    (said,) = [said for _, said in found if said]
    assert re.fullmatch(line, said)


# ---- by torchrun ----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.release
@pytest.mark.usefixtures("in_folder")
def test_ncf_by_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Output is that of one process, once; the saved model recommends in one process."""
    words = ["ncf", "--epochs", "2", "--batch", "128", "--device", "cpu", "--test-negatives", "20"]
    words += ["--users", "60", "--items", "50", "--interactions", "800", "--output"]
    said = torchrun(2, [*COMMAND, *words, "ours"])
    assert main([*words, "one"]) == 0
    shown = re.compile(r"epoch +\d+  loss [\d.]+  HR@10 [\d.]+  NDCG@10 [\d.]+")
    assert len(shown.findall(said)) == 3  # the best one again
    assert shown.findall(said) == shown.findall(capsys.readouterr().out)
    ours, one = (json.loads(Path(name, "run.json").read_text()) for name in ("ours", "one"))
    assert (ours["processes"], one["processes"]) == (2, 1)
    assert [each["loss"] for each in ours["epochs"]] == pytest.approx(
        [each["loss"] for each in one["epochs"]], rel=1e-4
    )
    best = []
    for name in ("ours", "one"):
        assert main(["recommend", name, "--user", "3", "-k", "3"]) == 0
        best.append(capsys.readouterr().out)
    assert best[0] == best[1]


@pytest.mark.release
@pytest.mark.usefixtures("in_folder")
def test_word2vec_by_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Neighbours and vectors are those of one process, and nothing is printed twice; by the documented command."""
    words = ["word2vec", "--generate", "30000", "--epochs", "1", "--dim", "8", "--device", "cpu", "--output"]
    said = torchrun(2, ["-m", "speedswap", *words, "ours"])
    assert main([*words, "one"]) == 0
    lines, usual = said.splitlines(), capsys.readouterr().out.splitlines()
    assert [line.split(" from ")[0] for line in lines[:-1]] == [line.split(" from ")[0] for line in usual[:-1]]
    assert lines[-1] == "saved ours/vectors.txt, ours/run.json, ours/loss.png"
    vectors, theirs = (read_vectors(Path(name)) for name in ("ours", "one"))
    assert vectors[0] == theirs[0]
    assert np.allclose(vectors[1], theirs[1], rtol=1e-3, atol=1e-5)


@pytest.mark.release
@pytest.mark.usefixtures("in_folder")
def test_dlrm_by_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Output is that of one process, once; the saved model predicts in one process."""
    words = ["dlrm", "--generate", "2000", "--ids", "200", "--dim", "4", "--capacity", "1000", "--batch", "250"]
    words += ["--bottom", "8", "--top", "8", "--device", "cpu", "--output"]
    said = torchrun(2, [*COMMAND, *words, "ours"])
    assert main([*words, "one"]) == 0
    shown = re.compile(r"epoch .*  [\d,]+ samples  test AUC [\d.]+  log loss [\d.]+")
    assert shown.findall(said)
    assert shown.findall(said) == shown.findall(capsys.readouterr().out)
    Path("rows").write_text(text_of(GeneratedSamples(100, ids=200).read(100)))
    probabilities = []
    for name in ("ours", "one"):
        assert main(["predict", name, "rows", "--device", "cpu"]) == 0
        probabilities.append([float(line) for line in capsys.readouterr().out.splitlines()])
    assert len(probabilities[0]) == 100
    assert np.allclose(*probabilities, rtol=0, atol=1e-5)


def read_vectors(folder: Path) -> tuple[list[str], np.ndarray]:
    lines = [line.split(" ") for line in (folder / "vectors.txt").read_text().splitlines()[1:]]
    return [line[0] for line in lines], np.array([[float(value) for value in line[1:]] for line in lines])

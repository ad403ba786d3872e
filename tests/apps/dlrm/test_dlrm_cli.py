"""The commands: their output, one line for every mistake, and Ctrl-C."""

from __future__ import annotations

import json
import signal

import pytest
from apps.dlrm.runs import text_of

from speedswap.apps.dlrm import GeneratedSamples, SampleFiles, Samples, load
from speedswap.cli import main

SMALL = "--generate 2000 --ids 100 --dim 4 --bottom 8 --top 8 --capacity 200 --batch 128 --device cpu".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    samples = GeneratedSamples(400, ids=50).read(400)
    lines = text_of(samples).splitlines()
    (tmp_path / "good.txt").write_text("\n".join(lines))
    (tmp_path / "unlabelled.txt").write_text("\n".join(line[2:] for line in lines))
    (tmp_path / "short.txt").write_text("\n".join([*lines[:5], "0\t1", *lines[5:]]))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = {
    "missing file": (["nowhere"], "samples nowhere cannot be read: No such file or directory"),
    "no file of a pattern": (["day_*"], "samples day_* matches no file"),
    "a folder": (["folder"], "samples folder is a directory: give its files, as in 'folder/*'"),
    "a pipe": (["/dev/null"], "samples /dev/null is not a regular file"),
    "short line": (["short.txt"], "samples short.txt, line 6 has 2 columns: give 40"),
    "no labels": (["unlabelled.txt"], "line 1 has 39 columns: give 40"),
    "a wrong test file": (["good.txt", "--test", "unlabelled.txt"], "line 1 has 39 columns: give 40"),
    "a test file that is trained on": (["g*.txt", "--test", "good.txt"], "test good.txt is also among samples, and"),
    "the same by another name": (
        ["good.txt", "--test", "folder/../good.txt"],
        "is also among samples, as good.txt, and",
    ),
    "a number beside files": (
        ["good.txt", "--generate", "100"],
        "samples is good.txt and --generate is 100: give one of",
    ),
    "ids beside files": (
        ["good.txt", "g*.txt", "--ids", "9"],
        "samples is good.txt,g*.txt and --ids is 9: give one of",
    ),
    "dim 0": (["--dim", "0"], "dim is 0"),
    "unknown eviction": (["--evict", "all"], "evict is 'all': give one of none, lru, lfu"),
    "bad optimizer": (["--optimizer", "adamm"], "optimizer is 'adamm'"),
    "optimizer that mixes rows": ([*SMALL, "--optimizer", "adafactor"], "Adafactor"),
    "nothing to resume": (["--resume"], "output dlrm-output has no checkpoint to go on from"),
    "output is a file": (["--output", "good.txt"], "is a file: give a directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(name, folder, capsys):
    before = {path.name for path in folder.iterdir()}
    assert main(["dlrm", *MISTAKES[name][0]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("speedswap: ")
    assert MISTAKES[name][1] in err
    assert {path.name for path in folder.iterdir()} == before


def test_widths_that_are_no_numbers_show_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["dlrm", "--top", "64,wide"])
    assert ended.value.code == 2
    assert "--top" in capsys.readouterr().err


def test_a_run_prints_each_evaluation_and_writes_what_it_found(tmp_path, capsys):
    output = tmp_path / "out"
    words = [*SMALL, "--evaluate-every", "8", "--output", str(output)]
    assert main(["dlrm", *words]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "epoch   1, step 8  1,024 samples  test AUC 0.",
        "epoch   1  1,800 samples  test AUC 0.",
        "1,800 samples in ",
        "200 samples tested, ",
        "best of 2: epoch",
        "saved",
    ):
        assert expected in printed
    report = json.loads((output / "run.json").read_text())
    assert len(report["evaluations"]) == 2
    assert report["interrupted"] is False
    assert main(["dlrm", *words, "--epochs", "2", "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "epoch   2  3,600 samples" in printed
    assert "epoch   1  1,800" not in printed.split("best of")[0]
    assert len(json.loads((output / "run.json").read_text())["evaluations"]) == 4


@pytest.mark.parametrize("rows, few", [(300, True), (20_000, False)])
def test_an_evaluation_on_few_samples_is_warned_of(rows, few, tmp_path, capsys):
    words = f"--generate {rows} --ids 100 --dim 2 --capacity 500 --holdout 10 --device cpu --bottom 2 --top 2".split()
    assert main(["dlrm", *words, "--output", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert (
        "other samples were tested, too few to judge the model: an AUC of chance has a standard error" in err
    ) == few


def test_no_option_has_an_empty_default(capsys):
    with pytest.raises(SystemExit):
        main(["dlrm", "--help"])
    assert "(default: )" not in " ".join(capsys.readouterr().out.split())


def test_every_option_reaches_the_settings(tmp_path):
    options = {
        "holdout": 5,
        "test_samples": 100,
        "generate": 1000,
        "ids": 60,
        "dim": 3,
        "bottom": [6, 5],
        "top": [7],
        "capacity": 150,
        "admit_after": 2,
        "evict": "lfu",
        "epochs": 1,
        "optimizer": "adam",
        "lr": 0.007,
        "batch": 90,
        "evaluate_every": 6,
        "storage": "disk",
        "state_dtype": "bfloat16",
        "device": "cpu",
        "seed": 11,
        "scratch": str(tmp_path),
        "lookahead": 0,
    }
    words = [
        word
        for name, value in options.items()
        for word in (
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if isinstance(value, list) else str(value),
        )
    ]
    assert main(["dlrm", *words, "--output", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["settings"] == options | {"samples": [], "test": []}
    assert report["tested_samples"] == 100
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_new_rows_are_predicted_from_a_checkpoint(folder, capsys):
    """Rows with labels are scored too; those without get the same probabilities, from any storage."""
    output = str(folder / "out")
    (folder / "same.txt").write_bytes((folder / "good.txt").read_bytes())
    assert main(["dlrm", "same.txt", "--test", "good.txt", *SMALL[4:], "--output", output]) == 0
    capsys.readouterr()
    assert main(["predict", output, "good.txt"]) == 0
    out, err = capsys.readouterr()
    model = load(output)
    samples = SampleFiles([folder / "good.txt"]).read(400)
    expected = model.predict(samples).sigmoid()
    assert [float(line) for line in out.splitlines()] == pytest.approx(expected.tolist(), abs=1e-6)
    best = json.loads((folder / "out" / "run.json").read_text())["best"]
    assert err == f"400 rows: AUC {best['auc']:.4f}, log loss {best['log_loss']:.4f}\n"
    assert main(["predict", output, "unlabelled.txt", "unlabelled*", "--storage", "disk"]) == 0
    again, err = capsys.readouterr()
    assert [float(line) for line in again.splitlines()] == pytest.approx(2 * expected.tolist(), abs=2e-6)
    assert err == ""

    for words, message in (
        ([output, "short.txt"], "samples short.txt, line 6 has 2 columns: give 40"),
        ([output, "nowhere"], "samples nowhere cannot be read"),
        ([str(folder), "good.txt"], "has no checkpoint to go on from: give the output directory of a run"),
        (["good.txt", "nowhere"], "output good.txt has no checkpoint to go on from: give the output directory of a"),
        ([output, "good.txt", "--storage", "cloud"], "storage is 'cloud'"),
        ([output, "good.txt", "--device", "toaster"], "device is 'toaster'"),
    ):
        assert main(["predict", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert message in err


def test_text_is_what_is_read(folder):
    samples = GeneratedSamples(300, ids=50, seed=4).read(300)
    (folder / "some").write_text(text_of(samples))
    found = SampleFiles([folder / "some"]).read(999)
    assert all(a.equal(b) for a, b in zip(found, samples, strict=True))
    rows = Samples(samples.labels[:0], *samples[1:])
    (folder / "some").write_text(text_of(rows))
    assert SampleFiles([folder / "some"], labelled=None).read(999).ids.equal(samples.ids)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "sent, status, word",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_interrupt_saves_the_results_so_far(sent, status, word, tmp_path, start_command):
    """Ctrl-C or SIGTERM once training has begun: a checkpoint is left, the run says so, the status is the shell's."""
    output = tmp_path / "out"
    process = start_command("dlrm", *SMALL, "--epochs", "1000000", "--output", output)
    assert process.stdout.readline().startswith("epoch   1")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{word}: the training so far is saved; the same command goes on from there" in out
    assert "Traceback" not in err
    assert json.loads((output / "run.json").read_text())["interrupted"] is True
    assert list((output / "checkpoints").glob("*/CHECKPOINT"))

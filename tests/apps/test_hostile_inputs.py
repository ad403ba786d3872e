"""Every command line succeeds, or is refused in one line; no traceback, no hang."""

from __future__ import annotations

import random

import pytest
from apps.hostile_inputs import SMALL, Outcome, command_lines, outcomes

from speedswap.cli import main

SEED = 20
CHOSEN = 25
HUGE = str(10**20)
W2V, NCF, DIGITS = ([command, *SMALL[command], "--output", "OUT"] for command in ("word2vec", "ncf", "digits"))
KNOWN = {
    "dim beyond any table": [*W2V, "--dim", HUGE],
    "dim of 2**31": [*W2V, "--dim", str(2**31)],
    "window beyond any sentence": [*W2V, "--window", HUGE],
    "window that memory does not hold": [*W2V, "--window", "900000"],
    "more negatives than a float": [*W2V, "--negative", "9" * 400],
    "words beyond any disk": ["word2vec", "--generate", HUGE, "--output", "OUT"],
    "words beyond this disk": ["word2vec", "--generate", str(2**47), "--output", "OUT"],
    "all batches ahead": [*W2V, "--lookahead", HUGE],
    "no value that argparse makes a list of": [*W2V, "--min-count=--"],
    "users without end": [*NCF, "--users", HUGE],
    "users that memory does not hold": [*NCF, "--users", str(2**38)],
    "items beyond 64 bits": [*NCF, "--items", str(2**63)],
    "interactions that memory does not hold": [*NCF, "--interactions", str(2**40)],
    "pairs beyond 64 bits": [*NCF, "--users", str(2**39), "--items", str(2**39), "--storage", "disk"],
    "factors beyond any table": [*NCF, "--factors", str(2**62)],
    "a layer beyond memory": [*NCF, "--layers", "4,999999999999"],
    "two layers beyond memory": [*NCF, "--layers", "65536,65536,65536,65536,65536"],
    "negatives beyond memory": [*NCF, "--negatives", str(2**31)],
    "batches beyond 64 bits": [*NCF, "--batch", HUGE],
    "digits of a width beyond memory": [*DIGITS, "--width", str(2**31)],
    "digits of a batch beyond 64 bits": [*DIGITS, "--batch", str(2**63)],
    "digits of a micro-batch beyond 64 bits": [*DIGITS, "--micro-batch-size", HUGE],
    "a budget beyond floating point": [*DIGITS, "--memory-budget", "9" * 400 + "MiB"],
    "samples beyond floating point": [*DIGITS, "--memory-budget", "9" * 400 + "samples"],
    "threads beyond 64 bits": ["bench", "--threads", HUGE],
    "a user of 5,000 digits": ["recommend", "MODEL", "--user", "9" * 5000],
    "a name that is too long": [*W2V, "--output", "n" * 300],
    "output below a name that is too long": [*NCF, "--output", "n" * 300 + "/below"],
    "scratch of a name that is too long": [*W2V, "--scratch", "n" * 300],
    "a model of a name that is too long": ["recommend", "n" * 300, "--user", "1"],
    "output is a link to nowhere": [*W2V, "--output", "places/dangling"],
    "output is a link to itself": [*DIGITS, "--output", "places/loop"],
    "output where no file can be made": [*NCF, "--output", "/proc"],
    "scratch where no file can be made": [*W2V, "--scratch", "/proc"],
    "the names of the results are taken": [*DIGITS, "--output", "places/taken"],
    "the name of the vectors is taken": [*W2V, "--output", "places/taken"],
    "checkpoints is a file": [*NCF, "--output", "places/checkpointed"],
    "word pairs without end": [*W2V, "--eval", "/dev/zero"],
    "word pairs of one line of a gibibyte": [*W2V, "--eval", "files/sparse"],
    "a corpus without end": ["word2vec", "/dev/zero", *W2V[2:]],
    "ratings without end": ["ncf", "/dev/zero"],
    "a bomb of newlines": ["word2vec", "files/bomb of newlines.gz", *W2V[2:]],
    "a bomb of words": ["word2vec", "files/bomb of words.gz", *W2V[2:]],
    "a bomb of ratings": ["ncf", "files/bomb of words.gz"],
    "ratings with a field of spaces": ["ncf", "files/spaces in a field"],
    "ratings of 5,000 digits": ["ncf", "files/digits"],
    "a column of 5,000 digits": ["ncf", "files/good.gz", "--columns", "user=1,item=" + "2" * 5000],
    "words that no output can show": [*W2V, "--nearest", "\udcff"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files, and a small model."""
    folder = tmp_path_factory.mktemp("hostile")
    assert main(["ncf", *SMALL["ncf"], "--output", str(folder / "model")]) == 0
    return folder


@pytest.fixture(scope="module")
def lines(folder):
    return command_lines(SEED, folder)


@pytest.mark.sweep(12)
@pytest.mark.slow
@pytest.mark.usefixtures("lines")  # which make the files
@pytest.mark.parametrize("name", KNOWN)
def test_what_once_failed_is_done_or_refused_in_a_line(name, folder, server):
    words = {"TEXT": str(folder / "text.txt"), "MODEL": str(folder / "model"), "OUT": str(folder / "out")}
    (outcome,) = outcomes([[words.get(word, word) for word in KNOWN[name]]], folder, server)
    assert outcome.failed is None, outcome
    if outcome.status == 2 and "usage:" not in outcome.errors:
        (said,) = [line for line in outcome.errors.splitlines() if line.startswith("speedswap: ")]
        assert len(said) < 1000


def test_some_of_any_kind_are_done_or_refused(folder, lines, server):
    """Different ones per seed: ``python tests/apps/hostile_inputs.py SEED FOLDER`` runs a thousand."""
    chosen = random.Random(SEED).sample(lines, CHOSEN)
    assert [outcome for outcome in outcomes(chosen, folder, server) if outcome.failed] == []


def test_the_same_seed_gives_the_same_lines(folder, lines, tmp_path):
    (tmp_path / "again").mkdir()
    again = command_lines(SEED, tmp_path / "again")
    assert len(again) > 300
    expected = [[word.replace(str(folder), "") for word in line] for line in lines]
    found = [[word.replace(str(tmp_path / "again"), "") for word in line] for line in again]
    assert all(line in expected for line in found)  # without a model there are fewer


@pytest.mark.parametrize(
    "outcome, failed",
    [
        (Outcome([], 0, 1.0, ""), None),
        (Outcome([], 2, 1.0, "speedswap: dim is 0"), None),
        (Outcome([], 130, 99.0, "interrupted: the vectors are saved"), None),
        (Outcome([], 130, 99.0, "speedswap: interrupted\n"), "does not end"),
        (Outcome([], 137, 99.0, ""), "does not end"),
        (Outcome([], 1, 1.0, "Traceback (most recent call last):"), "traceback"),
        (Outcome([], 139, 1.0, ""), "status 139"),
    ],
)
def test_what_counts_as_a_failure(outcome, failed):
    assert outcome.failed == failed

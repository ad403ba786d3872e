"""Whole runs: their results, which depend on the seed alone, and their files."""

from __future__ import annotations

import functools
import gc
import gzip
import itertools
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simulated_gpu
import torch

import speedswap
from speedswap.apps.errors import CorpusError, SettingsError
from speedswap.apps.word2vec import Run, Settings, train, training

FOOD = ["bread", "cheese", "apple", "soup", "salt", "honey"]
SEA = ["ship", "harbour", "wave", "sailor", "anchor", "storm"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sentences about food and sentences about the sea, of random words."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(topic, 8)) for _ in range(400) for topic in (FOOD, SEA)]
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small(corpus, **changes):
    """Make settings for such a small corpus."""
    return Settings(**{"corpus": corpus, "dim": 16, "sample": 0, "epochs": 3, "batch": 256, "device": "cpu"} | changes)


@pytest.fixture(scope="module")
def plain_run(corpus) -> Callable[..., Run]:
    """A run with the unchanged small settings, one per device."""
    return functools.cache(lambda device="cpu": train(small(corpus, device=device), progress=False))


def vectors_of(result):
    return np.stack([result.vectors[word] for word in result.vectors.words])


def test_words_of_a_topic_end_up_together(corpus, device):
    result = train(small(corpus, device=device, epochs=10), progress=False)
    assert sorted(result.vectors.words) == sorted(FOOD + SEA)
    for topic in (FOOD, SEA):
        for word in topic:
            assert {near for near, _ in result.vectors.nearest(word, 5)} == set(topic) - {word}
    assert result.loss[-1][1] < 0.9 * result.loss[0][1]


@pytest.mark.parametrize("storage", ["device", "pageable", "disk"])
def test_storage_does_not_change_the_vectors(corpus, plain_run, storage, device, tmp_path):
    """To the last bit; what a table on disk leaves in the temporary directory goes with the model."""
    expected = plain_run(device)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = train(small(corpus, device=device, storage=storage, scratch=scratch), progress=False)
    assert result.pairs == expected.pairs  # of the batches that were drawn
    assert result.loss == expected.loss
    assert np.array_equal(vectors_of(result), vectors_of(expected))
    result.model.close()
    assert list(scratch.iterdir()) == []


def test_seed_decides_the_vectors(corpus, device):
    first, again, other = (train(small(corpus, device=device, seed=seed), progress=False) for seed in (5, 5, 6))
    assert np.array_equal(vectors_of(first), vectors_of(again))
    assert [loss for _, loss in first.loss] == [loss for _, loss in again.loss]
    assert not np.array_equal(vectors_of(first), vectors_of(other))


@pytest.mark.parametrize("lookahead", [0, 3])
def test_lookahead_does_not_change_the_vectors(corpus, plain_run, lookahead, device):
    expected = plain_run(device)
    result = train(small(corpus, device=device, lookahead=lookahead), progress=False)
    assert np.array_equal(vectors_of(result), vectors_of(expected))
    assert result.loss == expected.loss


@pytest.mark.skipif(not simulated_gpu.is_on(), reason="the simulated GPU counts what the host waits for")
def test_a_step_on_a_gpu_is_waited_for_by_nobody(corpus, monkeypatch):
    """The host waits once per epoch for the number of words kept, at the end for the losses, and for row counts."""
    monkeypatch.setattr(training, "SECONDS_BETWEEN_LOOKS", math.inf)
    waits = []
    for epochs in (1, 4):
        with simulated_gpu.counted() as counts:
            train(small(corpus, device="cuda", epochs=epochs), progress=False)
        here = [wait for wait in map(str, counts.round_trips) if "/apps/word2vec/" in wait]
        waits.append((sum("nonzero" in wait for wait in here), len(here)))
    (kept, others), (kept_of_four, others_of_four) = waits
    assert (kept, kept_of_four) == (1, 4)
    assert others_of_four - others == 3


@pytest.mark.skipif(not simulated_gpu.is_on(), reason="the simulated GPU counts launches")
def test_a_step_on_a_gpu_has_few_operations(corpus, monkeypatch):
    """All that the main thread calls of torch, views and allocations too; every launch, and the wait for the rows."""
    monkeypatch.setattr(training, "LOSS_POINTS", 1)  # none is read while the step is counted
    counted = []
    step, steps = training.Word2VecRun.take, itertools.count()

    def take(run, batch):
        if next(steps) != 20:
            return step(run, batch)
        gc.collect()
        with simulated_gpu.counted() as counts, torch.autograd.profiler.profile() as profiled:
            step(run, batch)
        operations = [each for each in profiled.function_events if each.name.startswith("aten::")]
        outer = [
            each for each in operations if each.cpu_parent is None or not each.cpu_parent.name.startswith("aten::")
        ]
        (main,) = {each.thread for each in outer if each.name == "aten::sort"}
        counted.append((sum(each.thread == main for each in outer), counts.launches, len(counts.round_trips)))

    monkeypatch.setattr(training.Word2VecRun, "take", take)
    with simulated_gpu.policy("eager"):  # under which the simulation itself calls no operations of torch
        result = train(small(corpus, device="cuda"), progress=False)
    assert result.settings.storage == "device"
    ((operations, launches, waits),) = counted
    assert (launches, waits) == (9, 1)
    assert operations + launches + waits <= 45


@pytest.mark.skipif(not simulated_gpu.is_on(), reason="needs memory of a GPU to fill")
@pytest.mark.parametrize("change, storage, depth", [
    ({}, "device", 0), ({"storage": "pinned"}, "pinned", 1), ({"lookahead": 2}, "device", 2), (None, "auto", 1),
])  # fmt: skip
def test_tables_are_near_where_they_take_little_of_the_gpu(change, storage, depth):
    """A quarter of its free memory at most, with as much state as any optimizer of torch's keeps; else as asked for."""
    words = 10**12 if change is None else 1000
    found = Settings(device="cuda", dim=16, **change or {}).placed(words)
    assert (found.storage, found.lookahead_depth()) == (storage, depth)


def test_gzip_trains_as_plain_text_does(corpus, plain_run):
    packed = corpus.with_suffix(".txt.gz")
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    result = train(small(packed), progress=False)
    assert np.array_equal(vectors_of(result), vectors_of(plain_run()))


def test_figures_add_up(plain_run):
    """Without subsampling each window is drawn from 1 to 5 within a sentence of 8 words: 4.25 pairs per word."""
    result = plain_run()
    assert result.corpus_words == 6400
    assert result.trained_words == 3 * 6400
    assert result.pairs / result.trained_words == pytest.approx(4.25, abs=0.05)
    assert result.words_per_second == pytest.approx(result.trained_words / result.training_seconds)
    words, losses = zip(*result.loss, strict=True)
    assert all(before < after for before, after in itertools.pairwise(words))
    assert losses[0] == pytest.approx(6 * math.log(2), rel=0.1)


def test_losses_that_are_read_late_are_the_same(corpus, plain_run, monkeypatch):
    """On a GPU they are read when a second has passed; here, at the end."""
    expected = plain_run()
    looks = []

    class Late(training.Meter):
        def __init__(self, *args):
            super().__init__(*args)
            self._seconds = math.inf

        def _look(self):
            looks.append(len(self._unread))
            super()._look()

    monkeypatch.setattr(training, "Meter", Late)
    result = train(small(corpus), progress=False)
    assert looks == [len(expected.loss)]
    assert (result.loss, result.pairs) == (expected.loss, expected.pairs)


def test_both_tables_hold_the_optimizers_state(corpus):
    result = train(small(corpus, optimizer="adam", epochs=1), progress=False)
    for table in result.model.words.tables.values():
        assert set(table.columns) == {"weight", "exp_avg", "exp_avg_sq"}


def test_a_run_leaves_vectors_figures_and_plot(corpus, plain_run, tmp_path):
    pytest.importorskip("matplotlib")
    keyed = pytest.importorskip("gensim.models").KeyedVectors
    result = plain_run()
    folder = tmp_path / "made" / "here"
    files = result.write(folder)
    assert sorted(path.name for path in files) == sorted(path.name for path in folder.iterdir())
    theirs = keyed.load_word2vec_format(str(folder / "vectors.txt"))
    assert np.allclose(theirs["honey"], result.vectors["honey"], rtol=1e-5)
    report = json.loads((folder / "run.json").read_text())
    assert report["settings"]["corpus"] == str(corpus)
    assert report["settings"]["lr"] == 0.2
    assert report["settings"]["batch"] == 256
    assert report["trained_words"] == 3 * 6400
    assert report["loss"][-1]["loss"] == result.loss[-1][1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_sampling_everything_away_is_an_error(corpus):
    with pytest.raises(CorpusError, match=r"sample=1e-12 left no two words"):
        train(small(corpus, sample=1e-12), progress=False)


def test_a_loss_that_is_not_finite_ends_the_run(corpus):
    with pytest.raises(SettingsError, match=r"lr=1000000.0 is too large for sgd: the loss became"):
        train(small(corpus, optimizer="sgd", lr=1e6, epochs=20), progress=False)


def test_an_optimizer_that_mixes_rows_is_refused(corpus):
    with pytest.raises(speedswap.errors.OptimizerError):
        train(small(corpus, optimizer="adafactor"), progress=False)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dim": 0}, "dim is 0: give a whole number of 1 or more"),
        ({"window": 0}, "window is 0"),
        ({"negative": -1}, "negative is -1"),
        ({"min_count": 0}, "min_count is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"sample": -1.0}, "sample is -1.0"),
        ({"sample": math.nan}, "sample is nan"),
        ({"generate": 0}, "generate is 0"),
        ({"corpus": Path("text"), "generate": 9}, "corpus is text and generate is 9: give one of them"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"storage": "cloud"}, "storage is 'cloud': give one of auto, device"),
        ({"state_dtype": "float16"}, "state_dtype is 'float16': give one of float32, bfloat16"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm': give one of rowwise_adagrad"),
        ({"device": "toaster"}, "device is 'toaster': give one of cpu"),
        ({"device": "meta"}, "device is 'meta': give one of cpu"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**change)


def test_training_in_another_thread_works(corpus):
    """Only a main thread gets Ctrl-C; others train without."""
    results = []
    thread = threading.Thread(target=lambda: results.append(train(small(corpus, epochs=1), progress=False)))
    thread.start()
    thread.join()
    assert results[0].trained_words == 6400


def test_one_epoch_on_real_text_finds_likenesses(shared_data, tmp_path):
    """A tenth of the English corpus in three passes: far from good, but better than chance."""
    with gzip.open(shared_data / "english.txt.gz", "rt", encoding="utf-8") as text:
        part = tmp_path / "part.txt"
        part.write_text("".join(itertools.islice(text, 0, None, 10)), encoding="utf-8")
    result = train(Settings(corpus=part, epochs=3, batch=1024), progress=False)
    similarity = result.vectors.similarity(shared_data / "wordsim-353.txt")
    assert similarity.known > 150
    assert similarity.spearman > 0.1
    assert torch.isfinite(result.vectors.table.gather(torch.arange(len(result.vectors))).weight).all()


@pytest.mark.parametrize(
    "device, words, batch",
    [
        ("cpu", 500, 5),
        ("cpu", 400_000, 4000),
        ("cpu", 10**9, 16_384),
        ("cuda", 500, 2),
        ("cuda", 400_000, 2000),
        ("cuda", 10**9, 65_536),
    ],
)
def test_an_epoch_of_a_short_corpus_has_many_steps_all_the_same(device, words, batch):
    """A hundred; on a GPU, which takes many more centers at once where there are enough, two hundred."""
    assert Settings(optimizer="rowwise_adagrad").suited.batch_for(words, torch.device(device)) == batch


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sgd_takes_few_centers_anywhere(device):
    assert Settings(optimizer="sgd").suited.batch_for(10**9, torch.device(device)) == 512


def test_learning_rate_falls_linearly_except_with_adagrad(corpus):
    """Three epochs of 25 steps: the last step has 1/75 of the rate."""
    for optimizer, left in (("sgd", 1 / 75), ("adam", 1 / 75), ("adagrad", 1.0), ("rowwise_adagrad", 1.0)):
        result = train(small(corpus, optimizer=optimizer, lr=0.001), progress=False)
        assert result.lr == 0.001
        assert result.optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * left)

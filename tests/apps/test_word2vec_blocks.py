"""Window blocks hold exactly the pairs that the word2vec paper's double loop would make, on any device."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from apps.block_words import words_of
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap.apps.word2vec import blocks
from speedswap.apps.word2vec.blocks import BLOCK, NOISE, PairWeights, Sampler, kept_share, reach
from speedswap.apps.word2vec.corpus import Corpus


@pytest.fixture
def corpus_of(tmp_path):
    """Makes a corpus of sentences, each a list of words."""
    made = []

    def make(sentences, min_count=1):
        path = tmp_path / f"{len(made)}.txt"
        path.write_text("\n".join(" ".join(sentence) for sentence in sentences), encoding="utf-8")
        made.append(Corpus(path, min_count=min_count))
        return made[-1]

    yield make
    for corpus in made:
        corpus.close()


def places(lengths):
    """Make sentences of the given lengths in which each word is named after its place in the text, also its number."""
    ends = list(itertools.accumulate(lengths))
    return [[f"w{place}" for place in range(end - length, end)] for length, end in zip(lengths, ends, strict=True)]


def sampler_of(corpus, device, *, window=5, sample=0.0, seed=0):
    return Sampler(corpus, torch.device(device), window=window, sample=sample, seed=seed)


def pairs_in(batches, window, device, vocabulary):
    found = Counter()
    pair_weights = PairWeights(window, negative=5).to(device)
    for batch in batches:
        weights = pair_weights(batch.reach)[:, :, :-NOISE].cpu()
        centers, contexts = words_of(batch, vocabulary)
        for block, row, column in weights.nonzero().tolist():
            pair = int(centers[block, row]), int(contexts[block, column])
            found[pair] += float(weights[block, row, column])
    return found


def same(left, right):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(left[:3], right[:3], strict=True))


def test_one_center_by_hand():
    """The center at place 3 with two words to its left and one to its right, in a window of at most 2."""
    reach = torch.zeros(2, 1, BLOCK, dtype=torch.int64)
    reach[:, 0, 3] = torch.tensor([2, 1])
    weights = PairWeights(window=2, negative=8)(reach)
    assert weights.shape == (1, BLOCK, BLOCK + 4 + NOISE)
    expected = torch.zeros_like(weights)
    expected[0, 3, [3, 4, 6]] = 1  # its own column is 3 + 2
    expected[0, 3, -NOISE:] = 3 * 8 / NOISE
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("lengths", [[2], [1, 3, 1], [31, 1, 64], [200, 7, 45, 90]])
def test_pairs_are_those_of_a_double_loop(window, lengths, corpus_of, device):
    """Every center meets every word within its own reach, once, and no word of another sentence."""
    words = sum(lengths)
    batches = list(sampler_of(corpus_of(places(lengths)), device, window=window).batches(1, blocks_per_batch=2))
    reached = {}
    for batch in batches:
        for center, left, right in zip(
            *(t.flatten().tolist() for t in (words_of(batch, words)[0], *batch.reach)), strict=True
        ):
            if left or right:
                assert center not in reached
                reached[center] = (left, right)
    expected = Counter()
    start = 0
    for length in lengths:
        for center in range(start, start + length):
            left, right = reached.get(center, (0, 0))
            before, after = center - start, start + length - 1 - center
            drawn = max(left, right)
            assert (left, right) == (min(before, drawn), min(after, drawn))
            assert min(1, max(before, after)) <= drawn <= window
            expected.update((center, context) for context in range(center - left, center + right + 1))
            del expected[center, center]
        start += length
    assert pairs_in(batches, window, device, words) == expected
    assert [int(batch.pairs) for batch in batches] == [int(batch.reach.sum()) for batch in batches]
    assert sum(batch.corpus_words for batch in batches) == pytest.approx(words)
    assert all(batch.reach.shape[1] == 2 for batch in batches[:-1])


def test_blocks_come_in_random_order_and_epochs_differ(corpus_of, device):
    batches = list(sampler_of(corpus_of(places([1000])), device).batches(2, blocks_per_batch=1))
    firsts = [int(batch.words[0]) for batch in batches]
    first, second = firsts[: len(firsts) // 2], firsts[len(firsts) // 2 :]
    assert sorted(first) == sorted(second) == list(range(0, 1000, BLOCK))
    assert first != second
    assert first != sorted(first)


def test_window_sizes_are_uniform(corpus_of, device):
    """Inside one long sentence each of 1 to 5 is drawn a fifth of the time, alike on both sides."""
    sentences = torch.zeros(100_000, dtype=torch.int32, device=device)
    sampler = sampler_of(corpus_of([["a", "b"]]), device)
    left, right = (each.cpu() for each in reach(sentences, sampler.draw_blocks(100_000, 1)[0]))
    assert torch.equal(left[5:-5], right[5:-5])
    shares = np.bincount(left[5:-5], minlength=6) / len(left[5:-5])
    assert shares[0] == 0
    assert np.allclose(shares[1:], 0.2, atol=0.01)


def test_negatives_follow_the_counts_to_the_power_of_three_quarters(corpus_of, device):
    """Counts 256, 81, 16 and 1 are drawn as 64 : 27 : 8 : 1."""
    counts = {"a": 256, "b": 81, "c": 16, "d": 1}
    corpus = corpus_of([[word for word, count in counts.items() for _ in range(count)]])
    sampler = sampler_of(corpus, device)
    drawn = sampler.negatives(sampler.draw_blocks(1, 20_000)[2]).cpu()
    assert drawn.shape == (20_000, NOISE)
    assert drawn.dtype == torch.int32
    shares = np.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    assert np.allclose(shares, np.array([64, 27, 8, 1]) / 100, atol=0.003)


def test_blocks_end_with_the_negatives(corpus_of, device):
    corpus = corpus_of([["a"] * 5000 + ["b"] * 50])
    (batch,) = sampler_of(corpus, device).batches(1, blocks_per_batch=1000)
    contexts = words_of(batch, 2)[1]
    negatives = contexts[:, -NOISE:]
    assert contexts.shape[1] == BLOCK + 10 + NOISE
    rare = float((negatives == 1).float().mean())
    assert rare == pytest.approx(50**0.75 / (5000**0.75 + 50**0.75), rel=0.4)  # of 5,000: five standard deviations


def test_kept_share_by_hand():
    """f = .9 at sample .1 keeps (√9 + 1) / 9; f = .1 is kept whole; sample 0 keeps all."""
    assert kept_share(np.array([90, 10]), 0.1) == pytest.approx([4 / 9, 1.0])
    assert kept_share(np.array([90, 10]), 0.0).tolist() == [1.0, 1.0]


def test_subsampling_keeps_that_share_of_the_words(corpus_of, device):
    """Of words below min_count and ends of lines it keeps none."""
    counts = {"a": 60_000, "b": 30_000, "c": 10_000}
    frequent = [word for word, count in counts.items() for _ in range(count)]
    corpus = corpus_of([[*frequent[first : first + 100], f"rare{first}"] for first in range(0, len(frequent), 100)], 2)
    numbers, corpus_words = next(corpus.numbers(1 << 20))
    assert corpus_words == 101_000
    kept, sentences = sampler_of(corpus, device, sample=0.05).subsample(torch.from_numpy(numbers).to(device))
    frequency = np.array(list(counts.values())) / 100_000
    expected = np.minimum(1, (np.sqrt(frequency / 0.05) + 1) * 0.05 / frequency)
    assert np.allclose(np.bincount(kept.cpu()) / list(counts.values()), expected, atol=0.01)
    assert np.array_equal(kept.cpu().numpy(), np.searchsorted([600, 900], sentences.cpu().numpy(), side="right"))


def test_windows_close_over_words_that_were_thinned_out(corpus_of, device):
    """Pairs are made of what stays, as in the original program: neighbours may lie further apart in the text."""
    corpus = corpus_of(places([1000]))
    ((numbers, _),) = corpus.numbers(1 << 20)
    samplers = [sampler_of(corpus, device, window=1, sample=1e-4) for _ in range(2)]
    kept = samplers[0].subsample(torch.from_numpy(numbers).to(device))[0].tolist()
    assert 300 < len(kept) < 600
    neighbours = set(itertools.pairwise(kept))
    found = pairs_in(samplers[1].batches(1, 1000), 1, device, 1000)
    assert set(found) == neighbours | {(right, left) for left, right in neighbours}


def test_a_piece_without_pairs(corpus_of, device):
    sampler = sampler_of(corpus_of([["a", "b"]]), device)
    for numbers in ([], [0], [1]):
        piece = blocks.Piece(torch.tensor(numbers, dtype=torch.int32, device=device), 1)
        assert sum(int(batch.pairs) for batch in sampler.of_piece(piece, 4)) == 0


def test_windows_close_over_words_that_are_left_out(corpus_of, device):
    sentences = [["a", "rare", "b"], ["b", "other", "a"]]
    batches = list(sampler_of(corpus_of(sentences, min_count=2), device, window=1).batches(1, 4))
    assert pairs_in(batches, 1, device, 2) == Counter({(0, 1): 2, (1, 0): 2})


@pytest.mark.parametrize("resident", [True, False])
def test_pieces_and_where_they_stay_change_nothing_else(resident, corpus_of, device, monkeypatch):
    """A piece's end ends a sentence; a corpus too large for the device comes again each epoch."""
    monkeypatch.setattr(blocks, "PIECE_WORDS", {"cpu": 64, "cuda": 64})
    if not resident:
        monkeypatch.setattr(blocks, "RESIDENT_SHARE", 0.0)
    loads = []
    numbers = Corpus.numbers
    monkeypatch.setattr(
        Corpus, "numbers", lambda corpus, size, **more: loads.append(size) or numbers(corpus, size, **more)
    )
    corpus = corpus_of(places([150]))
    before = len(loads)
    batches = list(sampler_of(corpus, device, window=1).batches(3, blocks_per_batch=100))
    assert len(loads) - before == (1 if resident and device != "cpu" else 3)
    assert [batch.reach.shape[1] for batch in batches] == [2, 2, 1] * 3
    neighbours = [(place, place + 1) for place in range(149) if place + 1 not in (64, 128)]
    expected = Counter({pair: 3 for left, right in neighbours for pair in ((left, right), (right, left))})
    assert pairs_in(batches, 1, device, 150) == expected


def test_seed_decides_every_draw(corpus_of, device):
    corpus = corpus_of(places([500, 500]))
    first, again, other = (list(sampler_of(corpus, device, seed=seed).batches(2, 8)) for seed in (3, 3, 4))
    assert all(same(left, right) for left, right in zip(first, again, strict=True))
    assert not torch.equal(first[0].words, other[0].words)


def test_nothing_that_is_kept_makes_no_batches(corpus_of, device):
    assert list(sampler_of(corpus_of(places([1000])), device, sample=1e-300).batches(2, 8)) == []


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_batch_is_a_view_and_a_piece_is_asked_about_once(corpus_of):
    """On CPU tensors: there every operation shows that a GPU would be given, or would have to answer."""
    batches = sampler_of(corpus_of(places([5000])), "cpu").batches(1, blocks_per_batch=10)
    with _Operations() as first:
        next(batches)
    with _Operations() as others:
        count = len(list(batches))
    assert count == 15
    assert [name for name in first.names if name in ("nonzero", "item", "_local_scalar_dense", "unique")] == ["nonzero"]
    assert others.names == []

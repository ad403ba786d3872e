"""Window blocks hold exactly the pairs that the word2vec paper's double loop would make."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from speedswap.apps.word2vec.blocks import BLOCK, NOISE, PairWeights, Sampler, kept_share
from speedswap.apps.word2vec.corpus import Passage


def passage_of(lengths):
    """Make sentences of the given lengths in which each word's number is its place in the text."""
    words = np.arange(sum(lengths), dtype=np.int32)
    return Passage(words, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), len(words))


def sampler_for(words, *, window=5, sample=0.0, seed=0):
    return Sampler(np.ones(words, np.int64), window=window, sample=sample, seed=seed)


def pairs_in(batches, window, words):
    """Sum the weights of some batches as {(center, context): weight}, without the zeros."""
    found = Counter()
    for batch in batches:
        weights = PairWeights(window, negative=5)(batch.left, batch.right)[:, :, :-NOISE]
        for block, row, column in weights.nonzero().tolist():
            center, context = int(batch.centers[block, row]), int(batch.contexts[block, column])
            found[center, context] += float(weights[block, row, column])
    return found


def test_one_center_by_hand():
    """The center at place 3 with two words to its left and one to its right, in a window of at most 2."""
    left, right = torch.zeros(2, 1, BLOCK, dtype=torch.int64)
    left[0, 3], right[0, 3] = 2, 1
    weights = PairWeights(window=2, negative=8)(left, right)
    assert weights.shape == (1, BLOCK, BLOCK + 4 + NOISE)
    expected = torch.zeros_like(weights)
    expected[0, 3, [3, 4, 6]] = 1  # its own column is 3 + 2
    expected[0, 3, -NOISE:] = 3 * 8 / NOISE
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("lengths", [[2], [1, 3, 1], [31, 1, 64], [200, 7, 45, 90]])
def test_pairs_are_those_of_a_double_loop(window, lengths):
    """Every center meets every word within its own reach, once, and no word of another sentence."""
    passage = passage_of(lengths)
    words = len(passage.words)
    batches = list(sampler_for(words, window=window).batches(passage, blocks_per_batch=2))
    reach = {}
    for batch in batches:
        for center, left, right in zip(*(ids.flatten().tolist() for ids in (batch.centers, *batch[2:4])), strict=True):
            if left or right:
                reach[center] = (left, right)
    expected = Counter()
    start = 0
    for length in lengths:
        for center in range(start, start + length):
            left, right = reach.get(center, (0, 0))
            before, after = center - start, start + length - 1 - center
            drawn = max(left, right)
            assert (left, right) == (min(before, drawn), min(after, drawn))
            assert drawn <= window
            assert drawn >= min(1, max(before, after))
            for context in range(center - left, center + right + 1):
                if context != center:
                    expected[center, context] += 1
        start += length
    assert pairs_in(batches, window, words) == expected
    assert sum(batch.pairs for batch in batches) == expected.total()
    assert sum(batch.corpus_words for batch in batches) == pytest.approx(words)


def test_every_word_is_a_center_once():
    passage = passage_of([100, 200, 33])
    seen = Counter()
    for batch in sampler_for(333).batches(passage, blocks_per_batch=3):
        real = (batch.left + batch.right) > 0
        seen.update(batch.centers[real].tolist())
    assert seen == Counter(range(333))


def test_window_sizes_are_uniform():
    """Inside one long sentence each of 1 to 5 is drawn a fifth of the time, alike on both sides."""
    left, right = sampler_for(100_000).reach(np.zeros(100_000, np.int32))
    inner_left, inner_right = left[5:-5], right[5:-5]
    assert np.array_equal(inner_left, inner_right)
    shares = np.bincount(inner_left, minlength=6) / len(inner_left)
    assert shares[0] == 0
    assert np.allclose(shares[1:], 0.2, atol=0.01)


def test_negatives_follow_the_counts_to_the_power_of_three_quarters():
    """Counts 1, 16, 81 and 256 are drawn as 1 : 8 : 27 : 64."""
    sampler = Sampler(np.array([1, 16, 81, 256]), window=5, sample=0, seed=0)
    drawn = sampler.negatives(np.random.default_rng(0).random((20_000, NOISE)))
    assert drawn.shape == (20_000, NOISE)
    shares = np.bincount(drawn.ravel(), minlength=4) / drawn.size
    assert np.allclose(shares, np.array([1, 8, 27, 64]) / 100, atol=0.003)


def test_kept_share_by_hand():
    """f = .9 at sample .1 keeps (√9 + 1) / 9; f = .1 is kept whole; sample 0 keeps all."""
    assert kept_share(np.array([90, 10]), 0.1) == pytest.approx([4 / 9, 1.0])
    assert kept_share(np.array([90, 10]), 0.0).tolist() == [1.0, 1.0]


def test_subsampling_keeps_that_share_of_the_words():
    counts = np.array([60_000, 30_000, 10_000])
    words = np.repeat(np.arange(3, dtype=np.int32), counts)
    passage = Passage(words, np.arange(len(words), dtype=np.int32), len(words))
    kept, sentences = Sampler(counts, window=5, sample=0.05, seed=0).subsample(passage)
    assert np.array_equal(words[sentences], kept)
    frequency = counts / counts.sum()
    expected = (np.sqrt(frequency / 0.05) + 1) * 0.05 / frequency
    assert np.allclose(np.bincount(kept) / counts, np.minimum(1, expected), atol=0.01)


def test_windows_close_over_words_that_were_thinned_out():
    """Pairs are made of what stays, as in the original program: neighbours may lie further apart in the text."""
    passage = passage_of([1000])
    sampler = Sampler(np.ones(1000, np.int64), window=1, sample=1e-4, seed=0)
    kept = Sampler(np.ones(1000, np.int64), window=1, sample=1e-4, seed=0).subsample(passage)[0].tolist()
    assert 300 < len(kept) < 600
    neighbours = set(itertools.pairwise(kept))
    found = pairs_in(list(sampler.batches(passage, 1000)), 1, 1000)
    assert set(found) == neighbours | {(right, left) for left, right in neighbours}


@pytest.mark.parametrize("lengths", [[], [1]])
def test_a_passage_without_pairs(lengths):
    batches = list(sampler_for(1).batches(passage_of(lengths), 4))
    assert sum(batch.pairs for batch in batches) == 0


def test_seed_decides_every_draw():
    passage = passage_of([500, 500])
    first, again, other = (list(sampler_for(1000, seed=seed).batches(passage, 8)) for seed in (3, 3, 4))
    for left, right in zip(first, again, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(left[:4], right[:4], strict=True))
    assert not torch.equal(first[0].contexts, other[0].contexts)

"""Window blocks: the skip-gram pairs of many neighbouring words as one small matrix product.

``BLOCK`` consecutive words of the subsampled text are a block's centers. They are scored against the words from
``window`` before the first center to ``window`` after the last, and against ``NOISE`` negatives that the block shares.
Most of these scores belong to no pair: ``PairWeights`` says which do, from how far each center's own window reaches.
So looking up 32 + (32 + 2·5) + 32 words serves about 190 pairs, where pair by pair they would take 190 · 7 lookups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from speedswap.apps.word2vec.corpus import Passage

__all__ = ["BLOCK", "NOISE", "Batch", "PairWeights", "Sampler", "pair_weights_bytes"]

BLOCK = 32
"""Centers in a block."""
NOISE = 32
"""Negatives that a block shares."""
NOISE_POWER = 0.75


class Batch(NamedTuple):
    """Some window blocks, drawn from anywhere in a passage."""

    centers: Tensor
    """Ids, int64, shape (blocks, BLOCK)."""
    contexts: Tensor
    """Ids, int64, shape (blocks, BLOCK + 2 * window + NOISE): the words around, then the negatives."""
    left: Tensor
    """How many words before each center are its contexts, int64, shape (blocks, BLOCK)."""
    right: Tensor
    """How many words after it are."""
    pairs: Tensor
    """How many (center, context) pairs that makes, int64, a scalar: of a GPU, the host need not wait for it."""
    corpus_words: float
    """The batch's share of the passage's ``corpus_words``."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        centers, contexts, left, right, pairs = (tensor.to(device, non_blocking=True) for tensor in self[:5])
        return Batch(centers, contexts, left, right, pairs, self.corpus_words)


class Sampler:
    """Draws from a corpus what the word2vec paper draws: kept words, window sizes and negatives.

    Args:
        counts: how often each word of the vocabulary occurs, int64, shape (words,).
        window: the largest distance between the words of a pair; each center's own is uniform in 1 to ``window``.
        sample: of the occurrences of a word with frequency f, (√(f / sample) + 1) · sample / f are kept; 0 keeps all.
        seed: of all draws.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013; the
    formula of the kept share is that of its program, which differs from the paper's.
    """

    def __init__(self, counts: NDArray[np.int64], *, window: int, sample: float, seed: int) -> None:
        self.window = window
        self.kept_share = kept_share(counts, sample)
        self._cumulative = np.cumsum(counts**NOISE_POWER)
        self._random = np.random.default_rng(seed)

    def batches(self, passage: Passage, blocks_per_batch: int) -> Iterator[Batch]:
        """Yield a passage's window blocks in random order, ``blocks_per_batch`` at a time."""
        words, sentences = self.subsample(passage)
        left, right = self.reach(sentences)
        blocks = -(-len(words) // BLOCK)
        if not blocks:
            return
        # The last block's missing centers reach nowhere, so that they are in no pair.
        missing = (0, blocks * BLOCK - len(words))
        left, right = (np.pad(reach, missing).reshape(blocks, BLOCK) for reach in (left, right))
        padded = np.pad(words, (self.window, self.window + missing[1])).astype(np.int64)
        around = np.lib.stride_tricks.sliding_window_view(padded, BLOCK + 2 * self.window)[::BLOCK]
        negatives = self.negatives(blocks)
        order = self._random.permutation(blocks)
        for first in range(0, blocks, blocks_per_batch):
            chosen = order[first : first + blocks_per_batch]
            near = around[chosen]
            yield Batch(
                torch.from_numpy(near[:, self.window : self.window + BLOCK].copy()),
                torch.from_numpy(np.concatenate([near, negatives[chosen]], axis=1)),
                torch.from_numpy(left[chosen]),
                torch.from_numpy(right[chosen]),
                torch.tensor(left[chosen].sum() + right[chosen].sum()),
                passage.corpus_words * len(chosen) / blocks,
            )

    def subsample(self, passage: Passage) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The words that stay, and their sentences."""
        kept = self._random.random(len(passage.words), np.float32) < self.kept_share[passage.words]
        return passage.words[kept], passage.sentences[kept]

    def reach(self, sentences: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How far each word's window goes to the left and to the right without leaving its sentence."""
        starts = np.flatnonzero(np.diff(sentences, prepend=-1))
        lengths = np.diff(starts, append=len(sentences))
        before = np.arange(len(sentences)) - np.repeat(starts, lengths)
        after = np.repeat(lengths, lengths) - 1 - before
        window = self._random.integers(1, self.window + 1, len(sentences))
        return np.minimum(before, window), np.minimum(after, window)

    def negatives(self, blocks: int) -> NDArray[np.int64]:
        """Words drawn in proportion to count^0.75, shape (blocks, NOISE)."""
        drawn = self._random.random((blocks, NOISE)) * self._cumulative[-1]
        found: NDArray[np.int64] = np.searchsorted(self._cumulative[:-1], drawn, side="right")
        return found


def kept_share(counts: NDArray[np.int64], sample: float) -> NDArray[np.float32]:
    """Which share of each word's occurrences subsampling keeps, float32, shape (words,)."""
    if not sample:
        return np.ones(len(counts), np.float32)
    frequency = counts / counts.sum()
    share: NDArray[np.float32] = np.minimum(1, (np.sqrt(frequency / sample) + 1) * sample / frequency).astype(
        np.float32
    )
    return share


def pair_weights_bytes(window: int) -> int:
    """What ``PairWeights`` takes for a moment: two tables of float32, and one of them once more while it is made."""
    return 3 * 4 * BLOCK * (window + 1) * (BLOCK + 2 * window + NOISE)


class PairWeights(nn.Module):
    """What each score of a block counts in the loss.

    A score of a center and a word within its reach counts 1, one with any other word around 0. A center of p pairs has
    p · ``negative`` negatives, here as NOISE scores of equal weight. What the left reach gives and what the right one
    gives are looked up, each in a table of all that there are, and added.

    Args:
        window: the largest reach.
        negative: negatives for each pair.
    """

    def __init__(self, window: int, negative: int) -> None:
        super().__init__()
        center = torch.arange(BLOCK).view(-1, 1, 1)
        reach = torch.arange(window + 1).view(-1, 1)
        distance = torch.arange(-window, BLOCK + window) - center
        noise = (reach * (negative / NOISE)).expand(BLOCK, -1, NOISE)
        for side, pairs in (
            ("left", (distance < 0) & (distance >= -reach)),
            ("right", (distance > 0) & (distance <= reach)),
        ):
            weights = torch.cat([pairs.float(), noise], dim=2).flatten(0, 1)
            self.register_buffer(side, weights, persistent=False)
        self.register_buffer("first", center.flatten() * (window + 1), persistent=False)

    left: Tensor
    right: Tensor
    first: Tensor

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The weights of centers that reach so far, shape (blocks, BLOCK) each.

        Returns:
            float32, shape (blocks, BLOCK, BLOCK + 2 * window + NOISE): a row of the block's words for each center.
        """
        return F.embedding(left + self.first, self.left).add_(F.embedding(right + self.first, self.right))

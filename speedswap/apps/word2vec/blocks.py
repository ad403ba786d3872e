"""Window blocks: the skip-gram pairs of many neighbouring words as one small matrix product.

``BLOCK`` consecutive words of the subsampled text are a block's centers. They are scored against the words from
``window`` before the first center to ``window`` after the last, and against ``NOISE`` negatives that the block shares.
Most of these scores belong to no pair: ``PairWeights`` selects those that do, from the reach of each center's window.
So looking up 32 + (32 + 2·5) + 32 words serves about 190 pairs, where pair by pair they would take 190 · 7 lookups.

Two samplers draw them: ``Sampler`` on the CPU, passage by passage, and ``DeviceSampler`` on a GPU, where the corpus
lies as numbers. There a few operations make all blocks of some million words, in training order; a batch is then a
view, and the host asks once per piece how many words stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from speedswap.apps.ranks import Job
from speedswap.apps.word2vec.corpus import END, Corpus, Passage
from speedswap.batching.memory import free_bytes

BLOCK = 32
"""Centers in a block."""
NOISE = 32
"""Negatives of a block, shared by its centers."""
NOISE_POWER = 0.75
PIECE_WORDS = 1 << 22
"""Making their blocks takes about 60 bytes per word for a moment."""
RESIDENT_SHARE = 0.25
"""The most of the free memory for a corpus that stays on the device; a larger one is copied there in each epoch."""


class BlockPosition(NamedTuple):
    """A point in the course of all batches, from which they can resume."""

    epoch: int = 0
    piece: int = 0
    """Of the corpus, a passage on the CPU."""
    batch: int = 0
    """Batches of the piece that came before."""
    random: Any = None
    """The state of the random generator before the piece; None at the beginning."""


START = BlockPosition()


class BlockBatch(NamedTuple):
    """Some window blocks, drawn from anywhere in a passage."""

    centers: Tensor
    """Ids, int64, shape (blocks, BLOCK); of a rank's share of the blocks, as the other tensors."""
    contexts: Tensor
    """Ids, int64, shape (blocks, BLOCK + 2 * window + NOISE): the words around, then the negatives."""
    left: Tensor
    """Number of words before each center that are its contexts, int64, shape (blocks, BLOCK)."""
    right: Tensor
    """The same after it."""
    pairs: Tensor
    """Number of (center, context) pairs in all shares, an int64 scalar on the device; the host need not wait for it."""
    corpus_words: float
    """The batch's share of the passage's ``corpus_words``."""
    next: BlockPosition = START
    """The point after the batch."""

    def to(self, device: torch.device) -> BlockBatch:
        """Copy the batch to a device."""
        centers, contexts, left, right, pairs = (tensor.to(device, non_blocking=True) for tensor in self[:5])
        return BlockBatch(centers, contexts, left, right, pairs, *self[5:])


class Sampler:
    """A source of the word2vec paper's random choices, made on the CPU: kept words, window sizes and negatives.

    Args:
        counts: occurrences of each word of the vocabulary, int64, shape (words,).
        window: the largest distance between the words of a pair; each center's own is uniform in 1 to ``window``.
        sample: of the occurrences of a word with frequency f, (√(f / sample) + 1) · sample / f are kept; 0 keeps all.
        seed: of all draws.
        job: the ranks, each of which gets its share of every batch. All of them draw all numbers.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013; the
    formula of the kept share is that of its program, which differs from the paper's.
    """

    def __init__(
        self, counts: NDArray[np.int64], *, window: int, sample: float, seed: int, job: Job | None = None
    ) -> None:
        self.window = window
        self._job = job or Job()
        self.kept_share = kept_share(counts, sample)
        self._cumulative = np.cumsum(counts**NOISE_POWER)
        self._random = np.random.default_rng(seed)

    def all_batches(
        self, corpus: Corpus, epochs: int, blocks_per_batch: int, start: BlockPosition
    ) -> Iterator[BlockBatch]:
        """Yield the batches of every epoch, from a point on."""
        if start.random is not None:
            self._random.bit_generator.state = start.random
        yield from in_order(
            *(epochs, start, lambda skip: corpus.passages(skip=skip)),
            lambda passage: self.batches(passage, blocks_per_batch),
            lambda: self._random.bit_generator.state,
        )

    def batches(self, passage: Passage, blocks_per_batch: int) -> Iterator[BlockBatch]:
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
        drawn = self._random.random((blocks, NOISE))
        order = self._random.permutation(blocks)
        for first in range(0, blocks, blocks_per_batch):
            chosen = order[first : first + blocks_per_batch]
            ours = chosen[self._job.share(len(chosen))]
            near = around[ours]
            yield BlockBatch(
                torch.from_numpy(near[:, self.window : self.window + BLOCK].copy()),
                torch.from_numpy(np.concatenate([near, self.negatives(drawn[ours])], axis=1)),
                torch.from_numpy(left[ours]),
                torch.from_numpy(right[ours]),
                torch.tensor(left[chosen].sum() + right[chosen].sum()),
                passage.corpus_words * len(chosen) / blocks,
            )

    def subsample(self, passage: Passage) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the kept words, and their sentences."""
        kept = self._random.random(len(passage.words), np.float32) < self.kept_share[passage.words]
        return passage.words[kept], passage.sentences[kept]

    def reach(self, sentences: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the reach of each word's window to the left and to the right, within its sentence."""
        starts = np.flatnonzero(np.diff(sentences, prepend=-1))
        lengths = np.diff(starts, append=len(sentences))
        before = np.arange(len(sentences)) - np.repeat(starts, lengths)
        after = np.repeat(lengths, lengths) - 1 - before
        window = self._random.integers(1, self.window + 1, len(sentences))
        return np.minimum(before, window), np.minimum(after, window)

    def negatives(self, drawn: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the words that numbers from 0 to 1 stand for, in proportion to count^0.75."""
        found: NDArray[np.int64] = np.searchsorted(self._cumulative[:-1], drawn * self._cumulative[-1], side="right")
        return found


def in_order(
    epochs: int,
    start: BlockPosition,
    pieces: Callable[[int], Iterator[Any]],
    batches: Callable[[Any], Iterator[BlockBatch]],
    state: Callable[[], Any],
) -> Iterator[BlockBatch]:
    """Yield the batches of every epoch from a point on, each with the point after it.

    Args:
        epochs: of the whole run.
        start: the point to begin at.
        pieces: yields the corpus's pieces but the first few.
        batches: yields those of a piece.
        state: returns the state of the random generator.
    """
    for epoch in range(start.epoch, epochs):
        for number, piece in enumerate(pieces(start.piece), start.piece):
            here = BlockPosition(epoch, number, 0, state())
            for taken, batch in enumerate(batches(piece), 1):
                if taken > start.batch:
                    yield batch._replace(next=here._replace(batch=taken))
            start = START
        start = START


def kept_share(counts: NDArray[np.int64], sample: float) -> NDArray[np.float32]:
    """Return the share of each word's occurrences that subsampling keeps, float32, shape (words,)."""
    if not sample:
        return np.ones(len(counts), np.float32)
    frequency = counts / counts.sum()
    share: NDArray[np.float32] = np.minimum(1, (np.sqrt(frequency / sample) + 1) * sample / frequency).astype(
        np.float32
    )
    return share


class DevicePiece(NamedTuple):
    """Some of the corpus, on the device."""

    numbers: Tensor
    """As the corpus has them, int32, shape (n,): sentence ends and rare words among them."""
    corpus_words: int
    """Number of words among them."""


class DeviceSampler:
    """A source of the same random choices made on a device, with a generator of that device.

    They are distributed as those of :class:`Sampler`, but not the same: another generator, and blocks that are shuffled
    within larger pieces of the text.

    Args:
        corpus: the text.
        device: of the draws and of the batches.
        window, sample, seed, job: as for :class:`Sampler`.
    """

    def __init__(
        self,
        corpus: Corpus,
        device: torch.device,
        *,
        window: int,
        sample: float,
        seed: int,
        job: Job | None = None,
    ) -> None:
        self.window = window
        self._job = job or Job()
        self._corpus = corpus
        self._device = device
        position = corpus.position
        shares = np.append(kept_share(corpus.counts, sample), np.float32(0))  # the last is for words without a position
        self._position = torch.from_numpy(position).to(device)
        self._kept_share = torch.from_numpy(shares[position]).to(device)
        # In double precision: the rarest of millions of words have less than float32 resolves.
        self._cumulative = torch.from_numpy(np.cumsum(corpus.counts**NOISE_POWER)).to(device)
        self._noise_sum = float(self._cumulative[-1])
        self._random = torch.Generator(device).manual_seed(seed)
        self._resident: list[DevicePiece] | None = None

    def batches(self, epochs: int, blocks_per_batch: int, start: BlockPosition = START) -> Iterator[BlockBatch]:
        """Yield the corpus's window blocks, ``blocks_per_batch`` at a time, in random order within each piece.

        Args:
            epochs, blocks_per_batch: of the whole run.
            start: the point to begin at.
        """
        if start.random is not None:
            self._random.set_state(start.random)
        yield from in_order(
            *(epochs, start, self._pieces, lambda piece: self._of_piece(piece, blocks_per_batch)),
            self._random.get_state,
        )

    def _pieces(self, skip: int) -> Iterator[DevicePiece]:
        if self._resident is None:
            free = free_bytes(self._device)
            if free is None or self._corpus.nbytes > RESIDENT_SHARE * free:
                yield from self._loaded(skip)
                return
            self._resident = list(self._loaded())
        yield from self._resident[skip:]

    def _loaded(self, skip: int = 0) -> Iterator[DevicePiece]:
        for numbers, corpus_words in self._corpus.numbers(PIECE_WORDS, skip=skip):
            host = torch.from_numpy(numbers)
            if self._device.type == "cuda":
                host = host.pin_memory()
            yield DevicePiece(host.to(self._device, non_blocking=True), corpus_words)

    def _of_piece(self, piece: DevicePiece, blocks_per_batch: int) -> Iterator[BlockBatch]:
        words, sentences = self.subsample(piece.numbers)
        blocks = -(-len(words) // BLOCK)
        if not blocks:
            return
        order = torch.randperm(blocks, generator=self._random, device=self._device)
        missing = blocks * BLOCK - len(words)
        # The last block's missing centers reach nowhere, so that they are in no pair.
        left, right = (F.pad(reach, (0, missing)).view(blocks, BLOCK)[order] for reach in self.reach(sentences))
        padded = F.pad(words, (self.window, self.window + missing))
        near = padded.unfold(0, BLOCK + 2 * self.window, BLOCK)[order]
        centers = near[:, self.window : self.window + BLOCK].contiguous()
        contexts = torch.cat([near, self.negatives(blocks)], dim=1)
        # Summed for all batches at once, the last one padded with empty blocks.
        batches = -(-blocks // blocks_per_batch)
        pairs = F.pad((left + right).sum(1), (0, batches * blocks_per_batch - blocks))
        pairs = pairs.view(batches, blocks_per_batch).sum(1)
        for number in range(batches):
            first = number * blocks_per_batch
            size = min(blocks_per_batch, blocks - first)
            ours = self._job.share(size)
            some = slice(first + ours.start, first + ours.stop)
            corpus_words = piece.corpus_words * (size / blocks)
            yield BlockBatch(centers[some], contexts[some], left[some], right[some], pairs[number], corpus_words)

    def subsample(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept words, as positions in the vocabulary, and the numbers of their sentences: int32 both.

        Here alone the host waits, for their number.
        """
        drawn = torch.rand(len(numbers), generator=self._random, device=self._device)
        kept = (drawn < self._kept_share.index_select(0, numbers)).nonzero().squeeze(1)
        sentences = (numbers == END).cumsum(0, dtype=torch.int32)
        return self._position.index_select(0, numbers[kept]), sentences[kept]

    def reach(self, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reach of each word's window to the left and to the right, within its sentence."""
        place = torch.arange(len(sentences), device=self._device)
        before = place - torch.searchsorted(sentences, sentences)
        after = torch.searchsorted(sentences, sentences, right=True) - 1 - place
        window = torch.randint(1, self.window + 1, (len(sentences),), generator=self._random, device=self._device)
        return torch.minimum(before, window), torch.minimum(after, window)

    def negatives(self, blocks: int) -> Tensor:
        """Draw words in proportion to count^0.75, int32, shape (blocks, NOISE)."""
        drawn = torch.rand(blocks, NOISE, generator=self._random, device=self._device, dtype=torch.float64)
        return torch.searchsorted(self._cumulative[:-1], drawn.mul_(self._noise_sum), right=True, out_int32=True)


def pair_weights_bytes(window: int) -> int:
    """Return the peak memory of making ``PairWeights``: two tables of float32, and a copy of one."""
    return 3 * 4 * BLOCK * (window + 1) * (BLOCK + 2 * window + NOISE)


class PairWeights(nn.Module):
    """The weight of each score of a block in the loss.

    A score of a center and a word within its reach counts 1, one with any other word around 0. A center of p pairs has
    p · ``negative`` negatives, here as NOISE scores of equal weight. The contributions of the left and of the right
    reach are looked up, each in a table of all reaches, and added.

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
        """Return the weights of centers of these reaches, shape (blocks, BLOCK) each.

        Returns:
            float32, shape (blocks, BLOCK, BLOCK + 2 * window + NOISE): a row of the block's words for each center.
        """
        return F.embedding(left + self.first, self.left).add_(F.embedding(right + self.first, self.right))

"""Window blocks made on a GPU, where the corpus lies as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedswap.apps.ranks import Job
from speedswap.apps.word2vec.blocks import (
    BLOCK,
    NOISE,
    NOISE_POWER,
    START,
    BlockBatch,
    BlockPosition,
    kept_share,
    numbered,
)
from speedswap.apps.word2vec.corpus import END, Corpus
from speedswap.batching.memory import free_bytes

PIECE_WORDS = 1 << 22
"""Making their blocks takes about 60 bytes per word for a moment."""
RESIDENT_SHARE = 0.25
"""The most of the free memory for a corpus that stays on the device; a larger one is copied there in each epoch."""


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
        for epoch in range(start.epoch, epochs):
            for number, piece in enumerate(self._pieces(start.piece), start.piece):
                here = BlockPosition(epoch, number, 0, self._random.get_state())
                yield from numbered(self._of_piece(piece, blocks_per_batch), here, start.batch)
                start = START
            start = START

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

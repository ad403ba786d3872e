"""Window blocks: the skip-gram pairs of many neighbouring words as one small matrix product.

``BLOCK`` consecutive words of the subsampled text are a block's centers. They are scored against the words from
``window`` before the first center to ``window`` after the last, and against ``NOISE`` negatives that the block shares.
Most of these scores belong to no pair: ``PairWeights`` selects those that do, from the reach of each center's window.
So looking up 32 + (32 + 2·5) + 32 words serves about 190 pairs, where pair by pair they would take 190 · 7 lookups.

``Sampler`` draws them on the compute device: a few operations make all blocks of some million words, in training order;
a batch is then a view. On a GPU, where the corpus lies as numbers, the host asks once per piece how many words stayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from speedswap.apps.ranks import Job
from speedswap.apps.word2vec.corpus import END, Corpus
from speedswap.batching.memory import free_bytes
from speedswap.kernels import near

BLOCK = 32
"""Centers in a block."""
NOISE = 32
"""Negatives of a block, shared by its centers."""
NOISE_POWER = 0.75
PIECE_WORDS = {"cpu": 1 << 20, "cuda": 1 << 22}
"""By device. Making their blocks takes about 60 bytes per word for a moment."""
RESIDENT_SHARE = 0.25
"""The most of the free memory for a corpus that stays on the device; a larger one is copied there in each epoch."""


class BlockPosition(NamedTuple):
    """A point in the course of all batches, from which they can resume.

    Attributes:
        piece: of the corpus.
        batch: batches of the piece that came before.
        random: the state of the random generator before the piece; None at the beginning.
    """

    epoch: int = 0
    piece: int = 0
    batch: int = 0
    random: Tensor | None = None


START = BlockPosition()


class BlockBatch(NamedTuple):
    """Some window blocks, drawn from anywhere in a piece of the corpus.

    Attributes:
        words: ids, int32, one-dimensional, for a rank's share of the blocks: the BLOCK centers of each, then the
            contexts of each, BLOCK + 2 * window around and NOISE negatives, whose ids come after those of all centers.
        reach: number of words before each center that are its contexts, and after it, shape (2, blocks, BLOCK).
        pairs: number of (center, context) pairs in all shares, an int64 scalar on the device; the host need not wait
            for it.
        corpus_words: the batch's share of the piece's words, unknown ones included.
        next: the point after the batch.
    """

    words: Tensor
    reach: Tensor
    pairs: Tensor
    corpus_words: float
    next: BlockPosition = START


class Piece(NamedTuple):
    """Some of the corpus, on the device.

    Attributes:
        numbers: as the corpus has them, int32, shape (n,): sentence ends and rare words among them.
        corpus_words: number of words among them.
    """

    numbers: Tensor
    corpus_words: int


class Sampler:
    """A source of the word2vec paper's random choices: kept words, window sizes and negatives.

    A generator on the compute device draws them; a GPU's draws other numbers than the CPU's.

    Args:
        corpus: the text.
        device: of the draws and of the batches.
        window: the largest distance between the words of a pair; each center's own is uniform in 1 to ``window``.
        sample: of the occurrences of a word with frequency f, (√(f / sample) + 1) · sample / f are kept; 0 keeps all.
        seed: of all draws.
        job: the ranks, each of which gets its share of every batch. All of them draw all numbers.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013; the
    formula of the kept share is that of its program, which differs from the paper's.
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
        self._random = torch.Generator(device).manual_seed(seed)
        shares = np.append(kept_share(corpus.counts, sample), np.float32(0))  # the last is for words without a position
        self._kept_share = torch.from_numpy(shares[corpus.position]).to(device)
        self._position = torch.from_numpy(corpus.position).to(device)
        # In double precision: the rarest of millions of words have less than float32 resolves.
        self._cumulative = torch.from_numpy(np.cumsum(corpus.counts**NOISE_POWER)).to(device)
        self._noise_sum = float(self._cumulative[-1])
        self._resident: list[Piece] | None = None

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
                for taken, batch in enumerate(self.of_piece(piece, blocks_per_batch), 1):
                    if taken > start.batch:
                        yield batch._replace(next=here._replace(batch=taken))
                start = START
            start = START

    def _pieces(self, skip: int) -> Iterator[Piece]:
        if self._resident is None:
            free = None if self._device.type == "cpu" else free_bytes(self._device)
            if free is None or self._corpus.nbytes > RESIDENT_SHARE * free:
                yield from self._loaded(skip)
                return
            self._resident = list(self._loaded())
        yield from self._resident[skip:]

    def _loaded(self, skip: int = 0) -> Iterator[Piece]:
        for numbers, corpus_words in self._corpus.numbers(PIECE_WORDS[self._device.type], skip=skip):
            yield Piece(near(torch.from_numpy(numbers), self._device), corpus_words)

    def of_piece(self, piece: Piece, blocks_per_batch: int) -> Iterator[BlockBatch]:
        """Yield a piece's window blocks in random order, ``blocks_per_batch`` at a time."""
        words, sentences = self.subsample(piece.numbers)
        blocks = -(-len(words) // BLOCK)
        if not blocks:
            return
        windows, order, noise = self.draw_blocks(len(words), blocks)
        missing = blocks * BLOCK - len(words)
        # The last block's missing centers reach nowhere, so that they are in no pair.
        reached = F.pad(torch.stack(reach(sentences, windows)), (0, missing)).view(2, blocks, BLOCK)[:, order]
        padded = F.pad(words, (self.window, self.window + missing))
        around = padded.unfold(0, BLOCK + 2 * self.window, BLOCK)[order]
        centers = around[:, self.window : self.window + BLOCK]
        contexts = torch.cat([around, self.negatives(noise)], dim=1).add_(len(self._corpus.counts))
        # Summed for all batches at once, the last one padded with empty blocks.
        batches = -(-blocks // blocks_per_batch)
        pairs = F.pad(reached.sum((0, 2)), (0, batches * blocks_per_batch - blocks))
        pairs = pairs.view(batches, blocks_per_batch).sum(1)
        sizes = [*[blocks_per_batch] * (batches - 1), blocks - (batches - 1) * blocks_per_batch]
        corpus_words = [piece.corpus_words * size / blocks for size in sizes]
        if self._job.size > 1:
            shares = [self._job.share(size) for size in sizes]
            every = torch.split(torch.arange(blocks, device=order.device), sizes)
            ours = torch.cat([some[own] for some, own in zip(every, shares, strict=True)])
            centers, contexts, reached = centers[ours], contexts[ours], reached[:, ours]
            sizes = [own.stop - own.start for own in shares]
        words_of, reach_of = joined([centers, contexts], sizes), torch.split(reached, sizes, 1)
        yield from map(BlockBatch, words_of, reach_of, pairs.unbind(), corpus_words)

    def subsample(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept words, as positions in the vocabulary, and the numbers of their sentences: int32 both.

        Here alone the host waits for a GPU, for their number.
        """
        words = self._position.index_select(0, numbers)
        drawn = torch.rand(len(words), generator=self._random, device=self._device)
        kept = (drawn < self._kept_share.index_select(0, numbers)).nonzero().squeeze(1)
        sentences = (numbers == END).cumsum(0, dtype=torch.int32)
        return words[kept], sentences[kept]

    def draw_blocks(self, words: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a window from 1 to ``window`` for each word, the order of the blocks, and NOISE numbers for each."""
        drawn: dict[str, Any] = {"generator": self._random, "device": self._device}
        order, windows = torch.randperm(blocks, **drawn), torch.randint(1, self.window + 1, (words,), **drawn)
        return windows, order, torch.rand(blocks, NOISE, dtype=torch.float64, **drawn)

    def negatives(self, drawn: Tensor) -> Tensor:
        """Return the words that numbers from 0 to 1 stand for, in proportion to count^0.75: int32."""
        return torch.searchsorted(self._cumulative[:-1], drawn * self._noise_sum, right=True, out_int32=True)


def joined(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return for each batch the items of all parts, one part after the other.

    Args:
        parts: shape (blocks, items) each.
        sizes: the number of blocks of each batch, the same for all but the last.
    """
    whole = sum(sizes[:-1])
    runs = [each for each in ((slice(whole), len(sizes) - 1), (slice(whole, None), 1)) if each[1]]
    found = [torch.cat([part[some].reshape(count, -1) for part in parts], dim=1) for some, count in runs]
    return [batch for each in found for batch in each.unbind()]


def reach(sentences: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reach of each word's window to the left and to the right, within its sentence."""
    place = torch.arange(len(sentences), dtype=torch.int32, device=sentences.device)
    begins = torch.zeros_like(sentences)
    begins[1:] = sentences[1:] != sentences[:-1]
    number = begins.cumsum(0, dtype=torch.int32)
    sizes = torch.zeros_like(sentences).index_add_(0, number, torch.ones_like(sentences))
    size, end = (each.index_select(0, number) for each in (sizes, sizes.cumsum(0, dtype=torch.int32)))
    after = end - 1 - place
    return torch.minimum(size - 1 - after, windows), torch.minimum(after, windows)


def kept_share(counts: NDArray[np.int64], sample: float) -> NDArray[np.float32]:
    """Return the share of each word's occurrences that subsampling keeps, float32, shape (words,)."""
    if not sample:
        return np.ones(len(counts), np.float32)
    frequency = counts / counts.sum()
    share: NDArray[np.float32] = np.minimum(1, (np.sqrt(frequency / sample) + 1) * sample / frequency).astype(
        np.float32
    )
    return share


def pair_weights_bytes(window: int) -> int:
    """Return the peak memory of making ``PairWeights``: two tables of float32, and a copy of one."""
    return 3 * 4 * BLOCK * (window + 1) * (BLOCK + 2 * window + NOISE)


class PairWeights(nn.Module):
    """The weight of each score of a block in the loss.

    A score of a center and a word within its reach counts 1, one with any other word around 0. A center of p pairs has
    p · ``negative`` negatives, here as NOISE scores of equal weight. The contributions of the left and of the right
    reach are looked up, each among those of all reaches, and added.

    Args:
        window: the largest reach.
        negative: negatives for each pair.

    Attributes:
        signs: -1 for a block's words around, 1 for its negatives, shape (BLOCK + 2 * window + NOISE,).
    """

    def __init__(self, window: int, negative: int) -> None:
        super().__init__()
        center = torch.arange(BLOCK).view(-1, 1, 1)
        reach = torch.arange(window + 1).view(-1, 1)
        distance = torch.arange(-window, BLOCK + window) - center
        noise = (reach * (negative / NOISE)).expand(BLOCK, -1, NOISE)
        sides = (distance < 0) & (distance >= -reach), (distance > 0) & (distance <= reach)
        weights = torch.cat([torch.cat([pairs.float(), noise], dim=2).flatten(0, 1) for pairs in sides])
        first = torch.arange(2 * BLOCK).view(2, 1, BLOCK) * (window + 1)
        signs = torch.cat([torch.full((BLOCK + 2 * window,), -1.0), torch.ones(NOISE)])
        for name, buffer in {"weights": weights, "first": first, "signs": signs}.items():
            self.register_buffer(name, buffer, persistent=False)

    weights: Tensor
    first: Tensor
    signs: Tensor

    def forward(self, reach: Tensor) -> Tensor:
        """Return the weights of centers of these reaches to the left and to the right, shape (2, blocks, BLOCK).

        Returns:
            float32, shape (blocks, BLOCK, BLOCK + 2 * window + NOISE): a row of the block's words for each center.
        """
        return F.embedding(reach + self.first, self.weights).sum(0)

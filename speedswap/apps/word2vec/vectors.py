"""Trained word vectors: look up, compare, search, save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import speedswap
from speedswap.apps.errors import PairsError
from speedswap.apps.files import write_whole
from speedswap.tables.formats import write_rows

CHUNK_ROWS = 65_536
PAIRS_CHARACTERS = 1 << 24


class Similarity(NamedTuple):
    """The agreement of the vectors' similarities with people's, over pairs of words.

    Attributes:
        spearman: rank correlation, -1 to 1; NaN with fewer than two known pairs.
        known: pairs of which both words have a vector.
    """

    name: str
    spearman: float
    known: int
    total: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures, as JSON can hold them: it has no NaN."""
        return self._asdict() | {"spearman": self.spearman if math.isfinite(self.spearman) else None}

    def __str__(self) -> str:
        return f"{self.name}: Spearman {self.spearman:.3f} on {self.known} of {self.total} pairs"


class WordPairs(NamedTuple):
    """Pairs of words with their similarity to people, and the name of their file."""

    name: str
    pairs: list[tuple[str, str, float]]


class WordVectors:
    """The words of a vocabulary and the table with their vectors.

    Args:
        words: the vocabulary; a word's position is its row.
        table: the vectors.

    Example:
        >>> init = speedswap.init.constant(1.0)
        >>> vectors = WordVectors(["cat", "dog"], speedswap.Table.create(2, 3, storage="pageable", init=init))
        >>> vectors["dog"]
        array([1., 1., 1.], dtype=float32)
        >>> [word for word, cosine in vectors.nearest("dog")]
        ['cat']
    """

    def __init__(self, words: Sequence[str], table: speedswap.Table) -> None:
        self.words = words
        self.table = table
        self._position = {word: position for position, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._position

    def __getitem__(self, word: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self._gather([word])[0].numpy()
        return vector

    def _gather(self, words: Sequence[str]) -> Tensor:
        return self._rows(torch.tensor([self._position[word] for word in words]))

    def _rows(self, rows: Tensor) -> Tensor:
        return self.table.gather(rows, columns=["weight"], device="cpu").weight

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole table in order: the first row's number and the vectors, shape (rows, dim)."""
        for first in range(0, len(self), CHUNK_ROWS):
            yield first, self._rows(torch.arange(first, min(first + CHUNK_ROWS, len(self))))

    def nearest(self, word: str, count: int = 5) -> list[tuple[str, float]]:
        """Return the most similar other words and the cosines of their vectors with the word's, closest first.

        Raises:
            KeyError: the word is not in the vocabulary.
        """
        target = F.normalize(self._gather([word]), dim=1)[0]
        found: list[tuple[float, int]] = []
        for first, vectors in self.chunks():
            cosines = F.normalize(vectors, dim=1) @ target
            best = cosines.topk(min(count + 1, len(cosines)))
            found += zip(best.values.tolist(), (best.indices + first).tolist(), strict=True)
            found = sorted(found, reverse=True)[: count + 1]
        return [(self.words[row], cosine) for cosine, row in found if row != self._position[word]][:count]

    def similarity(self, pairs: Path | WordPairs) -> Similarity:
        """Compare with human judgement.

        Args:
            pairs: a text file with two words and a number per line, separated by tabs, as in WordSim-353 and
                SimLex-999; a heading and lines that start with ``#`` are skipped. Words are looked up as they are, else
                in lower case. Or the result of ``read_pairs``.

        Raises:
            PairsError: the file cannot be read.
        """
        name, all_pairs = pairs if isinstance(pairs, WordPairs) else read_pairs(pairs)
        known, human = [], []
        for first, second, score in all_pairs:
            words = [word if word in self else word.lower() for word in (first, second)]
            if all(word in self for word in words):
                known += words
                human.append(score)
        spearman = float("nan")
        if len(human) > 1:
            left, right = F.normalize(self._gather(known), dim=1).reshape(len(human), 2, -1).unbind(1)
            spearman = rank_correlation((left * right).sum(1).double().numpy(), np.array(human))
        return Similarity(name, spearman, len(human), len(all_pairs))

    def save(self, path: Path) -> None:
        """Write the vectors in word2vec's text format, which gensim's ``KeyedVectors.load_word2vec_format`` opens.

        They read back to the same bits, by :meth:`speedswap.Table.from_file` too.

        The file appears under its name only once it is whole.

        Raises:
            OutputError: it cannot be written.
        """
        with write_whole(path) as file:
            write_rows(file, self.table.store, "word2vec", keys=self.words)


def read_pairs(path: Path) -> WordPairs:
    """Read word pairs with human similarity; see ``WordVectors.similarity``.

    Raises:
        PairsError: the file cannot be read, or does not hold word pairs.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(PAIRS_CHARACTERS + 1)
        if len(text) > PAIRS_CHARACTERS:
            raise PairsError(f"word pairs {path} has more than {PAIRS_CHARACTERS:,} characters: is it of word pairs?")
        lines = text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"word pairs {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    pairs: list[tuple[str, str, float]] = []
    for number, line in enumerate(lines, 1):
        fields = line.strip().split("\t")
        if line.startswith("#") or not line.strip():
            continue
        try:
            score = float(fields[2])
        except (IndexError, ValueError):
            score = math.nan
        if math.isfinite(score):
            pairs.append((fields[0], fields[1], score))
        elif number > 1:
            raise PairsError(f"word pairs {path}, line {number}: {line[:60]!r} is not word, tab, word, tab, number")
    if not pairs:
        raise PairsError(f"word pairs {path} has no line with word, tab, word, tab, number")
    return WordPairs(path.stem, pairs)


def rank_correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation, equal values sharing their mean rank; NaN where all values are equal."""
    ours, theirs = (ranks - ranks.mean() for ranks in map(mean_ranks, (left, right)))
    scale = np.sqrt((ours @ ours) * (theirs @ theirs))
    return float(ours @ theirs / scale) if scale else float("nan")


def mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank: NDArray[np.float64] = np.cumsum(sizes) - (sizes - 1) / 2
    return mean_rank[group]

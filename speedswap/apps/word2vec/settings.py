"""What a run is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from speedswap.apps.places import (
    check_counts,
    check_memory,
    check_scratch,
    check_state_dtype,
    check_storage,
    compute_device,
)
from speedswap.apps.word2vec.blocks import pair_weights_bytes
from speedswap.apps.word2vec.errors import SettingsError
from speedswap.apps.word2vec.optimizer import DEFAULT_OPTIMIZER, optimizer_class

__all__ = ["Settings"]

LIMITS = {
    "dim": (1, 2**16),
    "window": (1, 10**6),
    "negative": (1, 2**20),
    "min_count": (1, 2**62),
    "epochs": (1, 10**9),
    "batch": (1, 2**31),
    "max_types": (1, 2**31 - 1),
    "generate": (1, 2**48),
    "lookahead": (0, 1024),
}
"""The least and the most of each count."""


@dataclass(frozen=True)
class Settings:
    """What to train word vectors from, and how.

    Args:
        corpus: UTF-8 text, plain or gzip, one sentence a line; without one, the news corpus that gensim brings.
        generate: instead of a corpus, so many random words with Zipf's frequencies, to see how fast training is.
        dim: length of a vector.
        window: the largest distance between the words of a pair.
        negative: negatives for each pair.
        min_count: words that are rarer are left out.
        sample: frequent words are thinned out above this frequency; 0 keeps all.
        epochs: passes over the corpus.
        optimizer: ``rowwise_adagrad``, or the name of any optimizer in ``torch.optim`` that works row by row.
        lr: learning rate; without one, what suits the optimizer. It falls linearly to almost nothing, except with
            Adagrad and ``rowwise_adagrad``, whose steps shrink by themselves.
        batch: centers a step, in blocks of 32; without one, what suits the optimizer and the length of the corpus.
        storage: where the tables live: ``auto``, ``device``, ``pinned``, ``pageable`` or ``memmap``.
        state_dtype: how the optimizer's state is stored: ``float32``, or ``bfloat16`` in half the bytes.
        device: where the batch's rows are computed with; CUDA where there is one, else the CPU.
        lookahead: how many batches ahead the rows are looked up; 0 for none. It does not change the result.
        seed: of everything random; on one machine, the same seed gives the same vectors.
        plain_words: lower-case the text and keep only letters and inner apostrophes. The demo corpus is always read so.
        max_types: with more different words than this while counting, the rarest so far are forgotten.
        scratch: the directory for temporary files (the corpus as numbers, 4 bytes a word, and memmap tables); the
            system's by default.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    corpus: Path | None = None
    generate: int | None = None
    dim: int = 100
    window: int = 5
    negative: int = 5
    min_count: int = 5
    sample: float = 1e-3
    epochs: int = 5
    optimizer: str = DEFAULT_OPTIMIZER
    lr: float | None = None
    batch: int | None = None
    storage: str = "auto"
    state_dtype: str = "float32"
    device: str | None = None
    lookahead: int = 1
    seed: int = 0
    plain_words: bool = False
    max_types: int = 10_000_000
    scratch: Path | None = None

    def __post_init__(self) -> None:
        check_counts(self, LIMITS)
        if self.corpus is not None and self.generate is not None:
            raise SettingsError(f"corpus is {self.corpus} and generate is {self.generate}: give one of the two")
        check_memory(f"the weights of pairs of window {self.window}", pair_weights_bytes(self.window), "lower window")
        if not 0 <= self.sample < math.inf:
            raise SettingsError(f"sample is {self.sample}: give a frequency such as 1e-3, or 0 to keep all words")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise SettingsError(f"lr is {self.lr}: give a number above 0")
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"seed is {self.seed}: give a whole number from 0 to 2**64 - 1")
        check_storage(self.storage)
        check_state_dtype(self.state_dtype)
        check_scratch(self.scratch)
        optimizer_class(self.optimizer)
        self.compute_device()

    def compute_device(self) -> torch.device:
        """The device that the batch's rows are computed with."""
        return compute_device(self.device)

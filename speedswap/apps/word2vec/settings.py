"""The settings of a run, and the optimizers that they name."""

# ruff: noqa: RUF009 (each option makes a new field)

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from speedswap.apps import options
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.options import TableSettings, check_memory, option, plain, whole
from speedswap.apps.word2vec.blocks import pair_weights_bytes
from speedswap.batching.memory import free_bytes
from speedswap.optim import RowwiseAdagrad

# The most of a GPU's free memory for tables that lie there unasked; a vector and what optimizers keep for it.
TABLES_SHARE, MOST_COLUMNS = 0.25, 3

# A first sum above 0 damps the first steps of a rare word.
OWN = {"rowwise_adagrad": partial(RowwiseAdagrad, initial_accumulator_value=0.1)}


class Suited(NamedTuple):
    """The settings that suit an optimizer, tuned on a corpus of 4 million words.

    Attributes:
        lr: learning rate; the optimizer's own default without one.
        batch: centers per step of a long corpus. Gradients are summed: only an optimizer that scales them takes many.
        gpu_batch: the same on a GPU, whose work on a step should take longer than its launch; ``batch`` by default.
        falls: True if the learning rate falls linearly to almost nothing; Adagrad's steps shrink anyway.
    """

    lr: float | None = None
    batch: int = 4096
    gpu_batch: int | None = None
    falls: bool = True

    def batch_for(self, corpus_words: int, device: torch.device) -> int:
        """Return centers per step for a corpus: at least a hundred steps per epoch, two hundred on a GPU."""
        if device.type == "cpu" or self.gpu_batch is None:
            return max(1, min(self.batch, corpus_words // 100))
        return max(1, min(self.gpu_batch, corpus_words // 200))

    def lr_left(self, progress: float) -> float:
        """Return the share of the learning rate that is left at a point between 0 and 1 of the training."""
        return max(1 - progress, 1e-4) if self.falls else 1.0


SUITED = {
    **dict.fromkeys(("rowwiseadagrad", "adagrad"), Suited(lr=0.2, batch=16_384, gpu_batch=65_536, falls=False)),
    "sgd": Suited(lr=0.05, batch=512),
    **dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), Suited(lr=0.01)),
}


def check_window(name: str, window: int) -> None:
    whole(1, 10**6)(name, window)
    check_memory(f"the weights of pairs of window {window}", pair_weights_bytes(window), f"lower {name}")


def check_sample(name: str, sample: float) -> None:
    if not 0 <= sample < math.inf:
        raise SettingsError(f"{name} is {sample}: give a frequency such as 1e-3, or 0 to keep all words")


@dataclass(frozen=True)
class Word2VecSettings(TableSettings):
    """The corpus to train word vectors on, and the way to.

    The learning rate falls linearly to almost nothing, except with Adagrad and ``rowwise_adagrad``, whose steps shrink
    anyway. Centers come in blocks of 32. Temporary files are the corpus as numbers, 4 bytes per word, and tables
    on disk.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    suited_lr: ClassVar = {name: suited.lr for name, suited in SUITED.items()}
    own_optimizers: ClassVar = OWN

    corpus: tuple[Path, ...] | Path | None = option(
        None,
        "files of UTF-8 text, plain or gzip, one sentence per line, or of Parquet with a column 'text'; or patterns of "
        "their names, such as 'texts/*.gz' (default: the small news corpus that gensim brings)",
        nargs="*",
        type=Path,
        metavar="CORPUS",
    )
    generate: int | None = option(
        None, "train on this many random words instead, to measure the speed", check=whole(1, 2**48), metavar="WORDS"
    )
    dim: int = option(100, "length of a vector", check=whole(1, 2**16))
    window: int = option(5, "largest distance between the words of a pair", check=check_window)
    negative: int = option(5, "negatives for each pair", check=whole(1, 2**20))
    min_count: int = option(5, "leave rarer words out", check=whole(1, 2**62))
    sample: float = option(1e-3, "thin out words above this frequency; 0 keeps all", check=check_sample)
    epochs: int = options.epochs(5, "the corpus")
    optimizer: str = options.optimizer("rowwise_adagrad", f"rowwise_adagrad, or {options.ROW_BY_ROW}", OWN)
    batch: int | None = option(
        None,
        "centers per step of all processes (default: what suits the optimizer and the corpus)",
        check=whole(1, 2**31),
    )
    plain_words: bool = option(
        False,
        "lower-case the text, keep only letters with their marks, and inner apostrophes (always for the demo corpus)",
    )
    max_types: int = option(
        10_000_000,
        "with more different words while counting, forget the rarest so far; no count is too low by more than the "
        "corpus's words divided by this",
        check=whole(1, 2**30),  # two ids each, of 32 bits
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.corpus, tuple) and len(self.corpus) < 2:
            object.__setattr__(self, "corpus", self.corpus[0] if self.corpus else None)
        if self.corpus is not None and self.generate is not None:
            raise SettingsError(f"corpus is {self.corpus} and {named('generate')} is {self.generate}: give one of them")

    @property
    def suited(self) -> Suited:
        """The settings that suit the optimizer."""
        return SUITED.get(plain(self.optimizer), Suited())

    def placed(self, words: int) -> Word2VecSettings:
        """Return the settings for a vocabulary: ``auto`` is the GPU's memory if the tables take a small share of it."""
        device, nbytes = self.compute_device(), 2 * words * self.dim * 4 * MOST_COLUMNS
        is_near = device.type == "cuda" and device.index in (None, torch.cuda.current_device())
        is_small = is_near and nbytes <= TABLES_SHARE * (free_bytes(device) or 0)
        return replace(self, storage="device") if is_small and self.storage == "auto" else self

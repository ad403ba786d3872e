"""word2vec: word vectors from text, with the tables outside the compute device.

As a command, ``speedswap word2vec CORPUS --output DIR``; as a function::

    from speedswap.apps.word2vec import Settings, train

    result = train(Settings(corpus=Path("english.txt.gz"), epochs=5))
    print(result.vectors.nearest("music"))

A run reads the text once (``corpus``), makes window blocks of it (``blocks``), trains two embeddings with any optimizer
(``model``, ``settings``, ``training``) and keeps the vectors (``vectors``, ``cli``).
"""

import warnings
from typing import Any

from speedswap.apps.errors import CorpusError, PairsError, SettingsError
from speedswap.apps.word2vec.cli import figures, save
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.settings import Word2VecSettings as Settings
from speedswap.apps.word2vec.training import Word2VecResult as Result
from speedswap.apps.word2vec.training import train
from speedswap.apps.word2vec.vectors import Similarity, WordVectors

__all__ = [
    "Corpus",
    "CorpusError",
    "PairsError",
    "Result",
    "Settings",
    "SettingsError",
    "Similarity",
    "WordVectors",
    "figures",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name != "RowwiseAdagrad":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "speedswap.apps.word2vec.RowwiseAdagrad is now speedswap.optim.RowwiseAdagrad, whose initial_sum is called "
        "initial_accumulator_value; this name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    from speedswap.optim import RowwiseAdagrad

    def init(self: Any, params: Any, lr: float = 0.2, *, initial_sum: float = 0.1, eps: float = 1e-10) -> None:
        RowwiseAdagrad.__init__(self, params, lr, eps, initial_accumulator_value=initial_sum)

    return type("RowwiseAdagrad", (RowwiseAdagrad,), {"__init__": init})

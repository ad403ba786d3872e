"""word2vec: word vectors from text, with the tables outside the compute device.

As a command, ``speedswap word2vec CORPUS --output DIR``; as a function::

    from speedswap.apps.word2vec import Settings, train

    result = train(Settings(corpus=Path("english.txt.gz"), epochs=5))
    print(result.vectors.nearest("music"))

A run reads the text once (``corpus``), makes window blocks of it (``blocks``), trains two embeddings with any optimizer
(``settings``, ``training``) and keeps the vectors (``vectors``).
"""

from speedswap.apps.word2vec.settings import Word2VecSettings as Settings
from speedswap.apps.word2vec.training import Word2VecRun as Run
from speedswap.apps.word2vec.vectors import Similarity, WordVectors

train = Run.train

__all__ = ["Run", "Settings", "Similarity", "WordVectors", "train"]

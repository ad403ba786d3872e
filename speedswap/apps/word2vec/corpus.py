"""A corpus read once: its vocabulary in memory, its words as numbers in a temporary file.

Every later pass reads the numbers, four bytes per word, and never the text again.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from os import SEEK_END
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.errors import CorpusError, SettingsError
from speedswap.apps.files import opened, says_unwritable
from speedswap.apps.options import in_gib

Counts = NDArray[np.int64]
CHUNK_WORDS = 1 << 20
CHUNK_SENTENCES = 1 << 16
GENERATED_SENTENCE = 20
NUMBER_BYTES = 4
CHUNK_CHARACTERS = 1 << 20
NOT_A_WORD = re.compile(r"[^\w'\n]+|[\d_]+|(?<!\w)'+|'+(?!\w)")
SENTENCE_END = "</s>"
"""The end of a line among the words, as in the original word2vec."""
END = 0
"""The number of ``SENTENCE_END`` in the temporary file."""
ELSEWHERE = "give another directory with scratch"


class Corpus:
    """A text's vocabulary, and its words as numbers.

    Args:
        path: UTF-8 text, plain or gzip, one sentence per line.
        min_count: words that are rarer are left out.
        plain_words: lower-case the text and keep only letters and inner apostrophes.
        max_types: with more different words than this while counting, the rarest so far are forgotten (as in the
            original word2vec), so that the vocabulary's memory is bounded too.
        scratch: the directory of the temporary file; the system's by default.

    Attributes:
        vocabulary: the words, most frequent first.
        counts: occurrences of each, int64.
        corpus_words: words of the text, unknown ones included.
        position: of each number in the temporary file, the word's place in the vocabulary; int32, -1 for
            omitted words and for ``END``.

    Raises:
        CorpusError: the text cannot be read, or has no two words in one sentence that occur ``min_count`` times.
    """

    def __init__(
        self,
        path: Path,
        *,
        min_count: int = 5,
        plain_words: bool = False,
        max_types: int = 10_000_000,
        scratch: Path | None = None,
    ) -> None:
        self._fill(path, scratch, min_count, lambda: self._read(plain_words, max_types))

    @classmethod
    def generated(
        cls, words: int, *, types: int = 50_000, min_count: int = 5, seed: int = 0, scratch: Path | None = None
    ) -> Corpus:
        """Make a corpus of random words with Zipf's frequencies, to measure the speed of training on.

        Tens of millions of words take seconds. Sentences have 20 words.

        Args:
            words: their number.
            types: the most different ones among them; the n-th has a frequency of about 1 / n.
            min_count: words that are rarer are left out.
            seed: the same one gives the same words.
            scratch: the directory of the temporary file; the system's by default.

        Raises:
            CorpusError: no two words occur ``min_count`` times.
            SettingsError: the disk has no room for the temporary file.

        Example:
            >>> with Corpus.generated(10_000, types=100) as corpus:
            ...     corpus.corpus_words, corpus.vocabulary[0]
            (10000, 'w1')
        """
        check_room(words, scratch)
        corpus = cls.__new__(cls)
        path = Path(f"{words:,} generated words")
        corpus._fill(path, scratch, min_count, lambda: corpus._generate(words, types, seed))
        return corpus

    def _fill(
        self, path: Path, scratch: Path | None, min_count: int, read: Callable[[], tuple[dict[str, int], Counts]]
    ) -> None:
        """Write the words' numbers to a temporary file, and build the vocabulary."""
        self.path = path
        self._numbers = temporary_file(scratch)
        try:
            self._keep(*read(), min_count)
        except BaseException:
            self.close()
            raise

    def _generate(self, words: int, types: int, seed: int) -> tuple[dict[str, int], Counts]:
        """Draw words and write their numbers down."""
        random = np.random.default_rng(seed)
        shares = np.cumsum(1 / np.arange(1, types + 1))
        # From a list that holds each word by its frequency: a binary search per word would take ten times as long.
        places = (np.arange(1 << 22) + 0.5) * (shares[-1] / (1 << 22))
        listed = (END + 1 + np.searchsorted(shares[:-1], places, side="right")).astype(np.int32)
        counts = np.zeros(END + 1 + types, np.int64)
        for first in range(0, words, GENERATED_SENTENCE * CHUNK_SENTENCES):
            drawn = listed[random.integers(0, len(listed), min(GENERATED_SENTENCE * CHUNK_SENTENCES, words - first))]
            counts += np.bincount(drawn, minlength=len(counts))
            ends = np.arange(GENERATED_SENTENCE, len(drawn) + 1, GENERATED_SENTENCE)
            self._write(np.insert(drawn, ends, END))
            counts[END] += len(ends)
        self.corpus_words = words
        return {f"w{number}": number for number in range(1, types + 1)}, counts

    def _read(self, plain_words: bool, max_types: int) -> tuple[dict[str, int], Counts]:
        """Read the text, number the words in order of appearance and write the numbers down."""
        new_number = count(END).__next__
        types: defaultdict[str, int] = defaultdict(new_number)
        types[SENTENCE_END]
        counts = np.zeros(1 << 16, np.int64)
        forgotten, before = 0, END
        for words in read_words(self.path, plain_words=plain_words):
            numbers = np.fromiter(map(types.__getitem__, words), np.int32, len(words))
            # Empty sentences are dropped: a file of empty lines would fill the disk.
            again = (numbers == END) & (np.concatenate([[before], numbers[:-1]]) == END)
            numbers, before = numbers[~again], int(numbers[-1]) if len(numbers) else before
            self._write(numbers)
            largest = int(numbers.max(initial=END))
            if largest >= len(counts):
                counts = np.concatenate([counts, np.zeros(largest, np.int64)])
            np.add.at(counts, numbers, 1)
            while len(types) > max_types:
                forgotten += 1
                known = {word: number for word, number in types.items() if counts[number] > forgotten}
                types = defaultdict(new_number, known | {SENTENCE_END: END})
        del types[SENTENCE_END]
        self.corpus_words = int(counts.sum() - counts[END])
        if not types:
            raise CorpusError(f"corpus {self.path} is empty: it needs text, one sentence per line")
        if len(types) == 1:
            raise CorpusError(f"corpus {self.path} has one word only, {next(iter(types))!r}: nothing to predict")
        return types, counts

    def _write(self, numbers: NDArray[np.int32]) -> None:
        with says_unwritable("the corpus as numbers, 4 bytes per word,", ELSEWHERE):
            self._numbers.write(numbers.data)
            self._numbers.flush()  # a full disk fails here

    def _keep(self, types: dict[str, int], counts: Counts, min_count: int) -> None:
        """Build the vocabulary of the words that are frequent enough."""
        words = list(types)
        numbers = np.fromiter(types.values(), np.int64, len(types))
        order = np.argsort(-counts[numbers], kind="stable")
        kept = order[counts[numbers[order]] >= min_count]
        if len(kept) < 2:
            raise CorpusError(
                f"min_count={min_count} leaves {len(kept)} of the {len(words):,} different words of {self.path}; "
                f"its second most frequent occurs {counts[numbers[order[1]]]:,} times: lower min_count"
            )
        self.vocabulary = [words[i] for i in kept]
        self.counts = counts[numbers[kept]]
        self.position = np.full(len(counts), -1, np.int32)
        self.position[numbers[kept]] = np.arange(len(kept), dtype=np.int32)
        by_piece = (np.cumsum(numbers == END)[self.position[numbers] >= 0] for numbers, _ in self.numbers(CHUNK_WORDS))
        if not any(np.any(sentences[1:] == sentences[:-1]) for sentences in by_piece):
            raise CorpusError(
                f"no line of {self.path} has two words of the vocabulary: nothing to predict; "
                "write one sentence per line, or lower min_count"
            )

    def numbers(self, size: int, *, skip: int = 0) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the temporary file in pieces of ``size`` numbers but the first ``skip``, each with a count of words."""
        count = self.nbytes // NUMBER_BYTES
        for first in range(skip * size, count, size):
            numbers = np.empty(min(size, count - first), np.int32)
            self._numbers.seek(first * NUMBER_BYTES)
            self._numbers.readinto(numbers.data)  # type: ignore[attr-defined]
            yield numbers, len(numbers) - int(np.count_nonzero(numbers == END))

    @property
    def checksum(self) -> int:
        """A checksum of the vocabulary and its counts, to tell one corpus from another."""
        return zlib.crc32("\n".join(self.vocabulary).encode(), zlib.crc32(self.counts.data, self.corpus_words % 2**32))

    @property
    def nbytes(self) -> int:
        """Bytes of the temporary file."""
        return self._numbers.seek(0, SEEK_END)

    def close(self) -> None:
        """Remove the temporary file."""
        with suppress(OSError):  # a full disk does not matter any more
            self._numbers.close()

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def temporary_file(scratch: Path | None) -> IO[bytes]:
    """Open an unnamed file, which is removed when it is closed."""
    with says_unwritable(f"scratch {scratch or tempfile.gettempdir()}", ELSEWHERE):
        return tempfile.TemporaryFile(dir=scratch)


def check_room(words: int, scratch: Path | None) -> None:
    """Refuse more words than the disk has room for, before it fills up."""
    folder = scratch or Path(tempfile.gettempdir())
    needed, free = NUMBER_BYTES * (words + words // GENERATED_SENTENCE), shutil.disk_usage(folder).free
    if needed > free:
        raise SettingsError(
            f"generate is {words}: as numbers they take {in_gib(needed)} GiB, and {folder} has {in_gib(free)} left: "
            "give fewer, or another directory with scratch"
        )


# ---- words of the text -----------------------------------------------------------------------------------------------


def read_words(path: Path, *, plain_words: bool = False) -> Iterator[list[str]]:
    """Yield the words of a text in lists of bounded length, in order.

    Args:
        path: UTF-8 text, plain or gzip (told by its first bytes or the suffix ``.gz``), one sentence per line, words
            separated by whitespace. A line may be of any length.
        plain_words: lower-case the text and keep only letters and inner apostrophes.

    Yields:
        Words, with ``SENTENCE_END`` at the end of each line; adjacent empty lines may count as one.

    Raises:
        CorpusError: the file is missing, unreadable, damaged or not text; the message says which.
    """
    unfinished = ""
    for chunk in read_characters(path):
        text = unfinished + chunk
        # The last word may go on in the next chunk.
        end = max(text.rfind(" "), text.rfind("\n"), text.rfind("\t")) + 1
        text, unfinished = text[:end], text[end:]
        if len(unfinished) > CHUNK_CHARACTERS:
            raise CorpusError(f"corpus {path} has a word of more than {CHUNK_CHARACTERS:,} characters: is it text?")
        yield split(text, plain_words)
    yield split(unfinished + "\n", plain_words)


def split(text: str, plain_words: bool) -> list[str]:
    if plain_words:
        text = NOT_A_WORD.sub(" ", text.lower())
    while "\n\n" in text:  # empty lines have no words, and may be very many
        text = text.replace("\n\n", "\n")
    return text.replace("\n", f" {SENTENCE_END} ").split()


def read_characters(path: Path) -> Iterator[str]:
    try:
        with opened(path, "corpus", CorpusError) as data, io.TextIOWrapper(data, encoding="utf-8-sig") as text:
            yield from iter(lambda: text.read(CHUNK_CHARACTERS), "")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"corpus {path} is not UTF-8 text ({error.reason}): convert it, for example with iconv"
        ) from error

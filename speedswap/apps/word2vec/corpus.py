"""A corpus read once: its vocabulary in memory, its words as numbers in a temporary file.

Every later pass reads the numbers, four bytes per word, and never the text again.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, compress, count
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.errors import CorpusError, SettingsError, named
from speedswap.apps.files import PARQUET, matching, opened, parquet_opened, says_unwritable
from speedswap.apps.options import in_gib

Counts = NDArray[np.int64]
CHUNK_WORDS = 1 << 20
CHUNK_SENTENCES = 1 << 16
GENERATED_SENTENCE = 20
NUMBER_BYTES = 4
CHUNK_CHARACTERS = 1 << 20
LETTER = r"[^\W\d_]"
JOINERS = "\u200c\u200d"
"""They shape the letters at both sides, or the marks before them."""
SENTENCE_END = "</s>"
"""The end of a line among the words, as in the original word2vec."""
END = 0
"""The number of ``SENTENCE_END`` in the temporary file."""
FORGOTTEN = 1
"""There the number of words that were forgotten."""
PARQUET_ROWS = 256


class Corpus:
    """A text's vocabulary, and its words as numbers.

    Args:
        path: files as for :func:`read_words`, or patterns of their names such as ``texts/*.gz``, one or several.
        min_count: words that are rarer are left out.
        plain_words: as for :func:`read_words`.
        max_types: with more different words than this while counting, the rarest so far are forgotten, so that the
            vocabulary's memory is bounded too.
        scratch: the directory of the temporary files; the system's by default.

    Attributes:
        vocabulary: the words, most frequent first.
        counts: occurrences of each, int64.
        corpus_words: words of the text, unknown ones included.
        missed: occurrences that any word's count may lack, since words were forgotten: at most corpus_words divided by
            max_types. Words that occur at least min_count + missed times are all in the vocabulary.
        position: of each number in the temporary file, the word's place in the vocabulary; int32, -1 for
            omitted words and for ``END``.

    Raises:
        CorpusError: the text cannot be read, or has no two words in one sentence that occur ``min_count`` times.

    Source: Manku and Motwani, Approximate frequency counts over data streams, 2002 (lossy counting).
    """

    def __init__(
        self,
        path: Path | Sequence[Path],
        *,
        min_count: int = 5,
        plain_words: bool = False,
        max_types: int = 10_000_000,
        scratch: Path | None = None,
    ) -> None:
        files = matching([path] if isinstance(path, str | Path) else path, "corpus", CorpusError, "texts/*.gz")
        shown = files[0] if len(files) == 1 else Path(f"{files[0]} and {len(files) - 1} more")
        self._fill(shown, scratch, min_count, lambda: self._read(files, plain_words, max_types, scratch))

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
        self.path, self.missed = path, 0
        self._regions: list[tuple[int, IO[bytes]]] = []  # ends, and the words' next numbers from there on, int32
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

    def _read(
        self, files: Sequence[Path], plain_words: bool, max_types: int, scratch: Path | None
    ) -> tuple[dict[str, int], Counts]:
        """Read the text, number the words in order of appearance and write the numbers down."""
        types: defaultdict[str, int] = defaultdict(count(END).__next__)
        types[SENTENCE_END], types[""]  # END and FORGOTTEN
        counts, lacking, before = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64), END
        for words in chain.from_iterable(read_words(path, plain_words=plain_words) for path in files):
            known = len(types)
            numbers = np.fromiter(map(types.__getitem__, words), np.int32, len(words))
            # Empty sentences are dropped: a file of empty lines would fill the disk.
            again = (numbers == END) & (np.concatenate([[before], numbers[:-1]]) == END)
            numbers, before = numbers[~again], int(numbers[-1]) if len(numbers) else before
            self._write(numbers)
            if len(types) > len(counts):
                more = np.zeros(len(types), np.int64)
                counts, lacking = np.concatenate([counts, more]), np.concatenate([lacking, more])
            np.add.at(counts, numbers, 1)
            lacking[known : len(types)] = self.missed  # they may have been forgotten before
            if len(types) > max_types + 2:
                kept = self._forget(counts[: len(types)], lacking[: len(types)], max_types, scratch)
                counts, lacking = counts[: len(types)][kept], lacking[: len(types)][kept]
                types = defaultdict(count(len(counts)).__next__, zip(compress(types, kept), count(), strict=False))
        del types[""]
        del types[SENTENCE_END]
        self.corpus_words = int(counts.sum() - counts[END])
        if not types:
            raise CorpusError(f"corpus {self.path} is empty: it needs text, one sentence per line")
        if len(types) == 1:
            raise CorpusError(f"corpus {self.path} has one word only, {next(iter(types))!r}: nothing to predict")
        return types, counts

    def _forget(self, counts: Counts, lacking: Counts, max_types: int, scratch: Path | None) -> NDArray[np.bool_]:
        """Forget the rarest words, and number the others again from here on; return which are kept.

        A word is kept if it may have occurred more than ``missed`` times. Each increase of that takes one occurrence
        from more than ``max_types`` words.
        """
        kept = np.ones(len(counts), bool)
        while np.count_nonzero(kept) > max_types + 2:
            self.missed += 1
            kept = counts + lacking > self.missed
            kept[[END, FORGOTTEN]] = True
        counts[FORGOTTEN] += counts[~kept].sum()
        after = np.full(len(counts), FORGOTTEN, np.int32)
        after[kept] = np.arange(np.count_nonzero(kept), dtype=np.int32)
        file = temporary_file(scratch)
        self._regions.append((self.nbytes // NUMBER_BYTES, file))
        with says_unwritable("the numbers of the words that were kept"):
            file.write(after.data)
        return kept

    def _renumber(self, last: NDArray[np.int32]) -> None:
        """Replace the numbers in the temporary file: the latest as given, those before as the regions say."""
        end = self.nbytes // NUMBER_BYTES
        for start, after in [*reversed(self._regions), (0, None)]:
            for first in range(start, end, CHUNK_WORDS):
                self._numbers.seek(first * NUMBER_BYTES)
                numbers = np.frombuffer(self._numbers.read(min(CHUNK_WORDS, end - first) * NUMBER_BYTES), np.int32)
                self._numbers.seek(first * NUMBER_BYTES)
                self._write(last[numbers])
            if after is not None:
                after.seek(0)
                last, end = last[np.frombuffer(after.read(), np.int32)], start
                after.close()

    def _write(self, numbers: NDArray[np.int32]) -> None:
        with says_unwritable("the corpus as numbers, 4 bytes per word,"):
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
                f"{named('min_count')}={min_count} leaves {len(kept)} of the {len(words):,} words of {self.path}; its "
                f"second most frequent occurs {counts[numbers[order[1]]]:,} times: lower {named('min_count')}"
            )
        self.vocabulary = [words[i] for i in kept]
        self.counts = counts[numbers[kept]]
        if self._regions:
            last = np.full(len(counts), FORGOTTEN, np.int32)
            last[END], last[numbers[kept]] = END, np.arange(FORGOTTEN + 1, FORGOTTEN + 1 + len(kept))
            self._renumber(last)
            numbers, kept = np.arange(FORGOTTEN + 1, FORGOTTEN + 1 + len(kept)), np.arange(len(kept))
        self.position = np.full(max(len(counts), int(numbers.max(initial=0)) + 1), -1, np.int32)
        self.position[numbers[kept]] = np.arange(len(kept), dtype=np.int32)
        by_piece = (np.cumsum(numbers == END)[self.position[numbers] >= 0] for numbers, _ in self.numbers(CHUNK_WORDS))
        if not any(np.any(sentences[1:] == sentences[:-1]) for sentences in by_piece):
            raise CorpusError(
                f"no line of {self.path} has two words of the vocabulary: nothing to predict; "
                f"write one sentence per line, or lower {named('min_count')}"
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
    with says_unwritable(f"{named('scratch')} {scratch or tempfile.gettempdir()}"):
        return tempfile.TemporaryFile(dir=scratch)


def check_room(words: int, scratch: Path | None) -> None:
    """Refuse more words than the disk has room for, before it fills up."""
    folder = scratch or Path(tempfile.gettempdir())
    needed, free = NUMBER_BYTES * (words + words // GENERATED_SENTENCE), shutil.disk_usage(folder).free
    if needed > free:
        raise SettingsError(
            f"{named('generate')} is {words}: as numbers they take {in_gib(needed)} GiB, and {folder} has "
            f"{in_gib(free)} left: give fewer, or another directory with {named('scratch')}"
        )


# ---- words of the text -----------------------------------------------------------------------------------------------


def read_words(path: Path, *, plain_words: bool = False) -> Iterator[list[str]]:
    """Yield the words of a text in lists of bounded length, in order.

    Args:
        path: UTF-8 text, plain or gzip (told by its first bytes or the suffix ``.gz``), one sentence per line, words
            separated by whitespace. A line may be of any length. Or Parquet with strings in a column ``text``, or in
            one column alone, one or more sentences per row.
        plain_words: lower-case the text and keep only letters, with their combining marks, and inner apostrophes; in
            Unicode's form NFC, with straight apostrophes, without soft hyphens.

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
    while "\n\n" in text:  # empty lines have no words, and may be very many
        text = text.replace("\n\n", "\n")
    if not plain_words:
        return text.replace("\n", f" {SENTENCE_END} ").split()
    text, marks = text.lower(), ""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        text = text.replace("\N{SOFT HYPHEN}", "")
        marks = "".join(sorted(each for each in set(text) if unicodedata.category(each) in ("Mn", "Mc")))
    return [SENTENCE_END if word == "\n" else word for word in words_with(marks).findall(text)]


@lru_cache
def words_with(marks: str) -> re.Pattern[str]:
    """Return the pattern of a plain word or the end of a line, in a text with these combining marks."""
    marked = f"[{marks}][{marks}{JOINERS}]*{LETTER}*|" * bool(marks)
    return re.compile(rf"{LETTER}+(?:{marked}['{JOINERS}]{LETTER}+)*|\n")


def read_characters(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces of bounded length."""
    with opened(path, "corpus", CorpusError) as data:
        if data.peek(len(PARQUET)).startswith(PARQUET):
            for rows in _rows_of_parquet(path):
                yield from (rows[i : i + CHUNK_CHARACTERS] for i in range(0, len(rows), CHUNK_CHARACTERS))
            return
        with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
            yield from iter(lambda: text.read(CHUNK_CHARACTERS), "")


def _rows_of_parquet(path: Path) -> Iterator[str]:
    """Yield the texts of some rows at a time, one per line."""
    with parquet_opened(path, "corpus", CorpusError) as file:
        kinds = ("string", "large_string", "string_view")
        strings = [each.name for each in file.schema_arrow if str(each.type) in kinds]
        name: Any = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
        if name is None:
            shown = ", ".join(strings) or "none"
            raise CorpusError(f"corpus {path} has columns of strings: {shown}; name the one to read 'text'")
        for batch in file.iter_batches(PARQUET_ROWS, columns=[name]):
            yield "".join(f"{row}\n" for row in batch.column(0).cast("large_string").drop_null().to_pylist())

"""The text is read once, in bounded memory, and comes back as the numbers of its known words."""

from __future__ import annotations

import gzip
import tracemalloc
import unicodedata
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from speedswap.apps.errors import CorpusError
from speedswap.apps.word2vec.corpus import CHUNK_CHARACTERS, END, SENTENCE_END, Corpus, read_characters, read_words
from speedswap.apps.word2vec.training import demo_corpus

TEXT = "the cat saw the dog\n\nthe dog ran \t away\nrare the cat"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def written(tmp_path, words, per_line):
    path = tmp_path / "many.txt"
    lines = (" ".join(words[first : first + per_line]) for first in range(0, len(words), per_line))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class Passage(NamedTuple):
    """Some known words, the number of each one's sentence, and a count with unknown words included."""

    words: np.ndarray
    sentences: np.ndarray
    corpus_words: int


def passages_of(corpus, size=1 << 20):
    """Yield the known words of each piece of the corpus."""
    for numbers, corpus_words in corpus.numbers(size):
        words = corpus.position[numbers]
        yield Passage(words[words >= 0], np.cumsum(numbers == END)[words >= 0], corpus_words)


def sentences_of(corpus, size):
    """Read the corpus in passages of ``size``: lists of words, one per sentence of each passage."""
    found = []
    for words, sentences, _ in passages_of(corpus, size):
        for sentence in np.unique(sentences):
            found.append([corpus.vocabulary[word] for word in words[sentences == sentence]])
    return found


def test_vocabulary_is_the_frequent_words_most_frequent_first(text):
    with Corpus(text, min_count=2) as corpus:
        assert corpus.vocabulary == ["the", "cat", "dog"]
        assert corpus.counts.tolist() == [4, 2, 2]
        assert corpus.corpus_words == len(TEXT.split())


def test_passages_are_the_known_words_of_each_line(text):
    with Corpus(text, min_count=2) as corpus:
        (passage,) = passages_of(corpus)
        assert [corpus.vocabulary[word] for word in passage.words] == [
            "the",
            "cat",
            "the",
            "dog",
            "the",
            "dog",
            "the",
            "cat",
        ]
        assert passage.corpus_words == 12
        assert sentences_of(corpus, 1 << 20) == [["the", "cat", "the", "dog"], ["the", "dog"], ["the", "cat"]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_passages_of_any_size_hold_the_same_words(text, size):
    with Corpus(text, min_count=1) as corpus:
        assert [word for sentence in sentences_of(corpus, size) for word in sentence] == TEXT.split()
        assert sum(passage.corpus_words for passage in passages_of(corpus, size)) == corpus.corpus_words


def test_two_passes_at_once_do_not_disturb_each_other(text):
    with Corpus(text, min_count=1) as corpus:
        together = zip(passages_of(corpus, 3), passages_of(corpus, 3), strict=True)
        assert all(np.array_equal(left.words, right.words) for left, right in together)


@pytest.mark.parametrize("per_line", [7, 10**9], ids=["many lines", "one line"])
def test_words_are_whole_across_chunks(tmp_path, per_line):
    """Text of several chunks gives the words and counts of Python's split."""
    words = [f"word{number % 5003}" for number in range(3 * CHUNK_CHARACTERS // 8)]
    path = written(tmp_path, words, per_line)
    read = [word for chunk in read_words(path) for word in chunk if word != SENTENCE_END]
    assert read == words
    with Corpus(path, min_count=1) as corpus:
        assert dict(zip(corpus.vocabulary, corpus.counts.tolist(), strict=True)) == Counter(words)


def test_gzip_is_read_as_plain_text_is_whatever_its_name(text, tmp_path):
    for name in ("text.gz", "text"):
        packed = tmp_path / name
        packed.write_bytes(gzip.compress(TEXT.encode()))
        assert list(read_words(packed)) == list(read_words(text))


def test_line_ends_and_byte_order_mark_of_other_systems(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone two\r\nthree\r\n")
    assert next(iter(read_words(path))) == ["one", "two", SENTENCE_END, "three", SENTENCE_END]


def test_plain_words_are_lower_case_letters_and_inner_apostrophes(tmp_path):
    path = tmp_path / "raw.txt"
    path.write_text("The 4:00pm 'Fire', it isn't O'Brien's... Köln_Bonn\nEND", encoding="utf-8")
    words = [word for chunk in read_words(path, plain_words=True) for word in chunk]
    expected = ["the", "pm", "fire", "it", "isn't", "o'brien's", "köln", "bonn", SENTENCE_END, "end", SENTENCE_END]
    assert words == expected


WORDS = {
    "Hindi": ("हिन्दी भाषा।", ["हिन्दी", "भाषा"]),
    "Thai": ("ที่ นี่", ["ที่", "นี่"]),
    "Arabic with vowels": ("كِتَاب، قلم", ["كِتَاب", "قلم"]),
    "Hebrew with vowels": ("שָׁלוֹם לך", ["שָׁלוֹם", "לך"]),
    "Persian with non-joiners": ("می\u200cخواهم کتاب\u200c", ["می\u200cخواهم", "کتاب"]),
    "Sinhala with joiners": ("ශ්\u200dරී ලංකා", ["ශ්\u200dරී", "ලංකා"]),
    "Malayalam with final joiners": ("അവന്\u200d വന്നു", ["അവന്\u200d", "വന്നു"]),
    "decomposed": (unicodedata.normalize("NFD", "Élève d'été, élève"), ["élève", "d'été", "élève"]),
    "a mark that no letter has composed": ("x\u0304y z\u0301\u0323", ["x\u0304y", "\u1e93\u0301"]),
    "Turkish": ("İstanbul İZMİR ışık", ["i\u0307stanbul", "i\u0307zmi\u0307r", "ışık"]),
    "typographic apostrophes": ("Don’t ‘quote’ l’été don't", ["don't", "quote", "l'été", "don't"]),
    "soft hyphens": ("Donau\xaddampf\xadschiff", ["donaudampfschiff"]),
    "marks without a letter": ("❤\ufe0f 1\ufe0f\u20e3 \u0301 👩\u200d💻 4\u0301a", ["a"]),
    "Chinese": ("你好，世界", ["你好", "世界"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_plain_words_are_whole_in_any_script(name, tmp_path):
    """Marks, joiners and apostrophes belong to the letters that they follow; digits and symbols keep none."""
    text, expected = WORDS[name]
    path = tmp_path / "text"
    path.write_text(f"{text}\n{text}", encoding="utf-8")
    words = [word for chunk in read_words(path, plain_words=True) for word in chunk]
    assert words == [*expected, SENTENCE_END] * 2


def test_plain_words_do_not_depend_on_what_else_is_in_a_piece_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr("speedswap.apps.word2vec.corpus.CHUNK_CHARACTERS", 16)
    path = tmp_path / "text"
    path.write_text(" ".join(text for text, _ in WORDS.values()), encoding="utf-8")
    words = [word for chunk in read_words(path, plain_words=True) for word in chunk]
    assert words == [*(word for _, expected in WORDS.values() for word in expected), SENTENCE_END]


def peak_bytes(path):
    """Measure the peak memory of reading a corpus and one pass over it."""
    tracemalloc.start()
    try:
        with Corpus(path, max_types=30_000) as corpus:
            assert sum(passage.corpus_words for passage in passages_of(corpus, 1 << 16)) == corpus.corpus_words
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.release
@pytest.mark.parametrize("per_line", [20, 10**9], ids=["many lines", "one line"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, per_line):
    """Four times the text takes at most a third more memory: what one chunk takes, and how full it happens to be."""
    peaks = []
    for count in (250_000, 1_000_000):
        words = [f"word{number % 9973}" for number in range(count)]
        peaks.append(peak_bytes(written(tmp_path, words, per_line)))
    assert peaks[1] < 1.33 * peaks[0]


@pytest.mark.release
def test_words_that_never_come_again_take_almost_no_memory(tmp_path):
    """Beyond ``max_types``, only a word's number is left of it: 32 bytes at most, while the array of counts grows."""
    peaks = []
    for count in (100_000, 400_000):
        words = [word for number in range(count) for word in (f"word{number % 97}", f"a_new_word_{number}")]
        peaks.append(peak_bytes(written(tmp_path, words, 20)))
    assert peaks[1] < 1.05 * peaks[0] + 32 * 300_000


def test_forgetting_rare_words_keeps_the_counts_of_frequent_ones(tmp_path):
    words = [word for number in range(150_000) for word in ("often", "always", f"once{number}")]
    with Corpus(written(tmp_path, words, 20), min_count=5, max_types=50_000) as corpus:
        assert corpus.vocabulary == ["often", "always"]
        assert corpus.counts.tolist() == [150_000, 150_000]
        assert corpus.corpus_words == 450_000


@pytest.mark.parametrize(
    "content, settings, message",
    [
        (b"", {}, "is empty"),
        (b" \n\n \t\n", {}, "is empty"),
        (gzip.compress(b"", mtime=0), {}, "is empty"),
        (b"word word word", {}, "one word only, 'word'"),
        (b"one two three", {}, r"min_count=5 leaves 0 of the 3 words .* lower min_count"),
        (b"a a a a a b", {}, "min_count=5 leaves 1 of the 2"),
        (b"a\nb\na\nb", {"min_count": 1}, "no line .* has two words"),
        (gzip.compress(b"some text " * 1000, mtime=0)[:-12], {}, "not a whole gzip file"),
        (gzip.compress(b"some text " * 1000, mtime=0)[:20] + b"damage" * 9, {}, "not a whole gzip file"),
        (b"\xff\xfe\x00text", {}, "not UTF-8"),
        (b"x" * (2 * CHUNK_CHARACTERS + 1), {}, "a word of more than 1,048,576 characters"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(tmp_path, content, settings, message):
    path = tmp_path / "corpus"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        Corpus(path, **settings)


def test_a_file_that_is_not_there_or_not_what_its_name_says(tmp_path):
    with pytest.raises(CorpusError, match="No such file"):
        Corpus(tmp_path / "nowhere.txt")
    with pytest.raises(CorpusError, match="is a directory: give its files"):
        Corpus(tmp_path)
    plain = tmp_path / "plain.gz"
    plain.write_text(TEXT, encoding="utf-8")
    with pytest.raises(CorpusError, match="not a whole gzip file"):
        Corpus(plain)


def test_demo_corpus_has_sixty_thousand_words():
    pytest.importorskip("gensim")
    with Corpus(demo_corpus(), min_count=2, plain_words=True) as corpus:
        assert 55_000 < corpus.corpus_words < 65_000
        assert "australia" in corpus.vocabulary


def test_generated_words_have_zipfs_frequencies_in_sentences_of_twenty():
    words, types = 200_005, 500
    with Corpus.generated(words, types=types, seed=1) as corpus:
        assert corpus.corpus_words == words
        assert corpus.counts.sum() == words
        numbers = np.array([int(word.removeprefix("w")) for word in corpus.vocabulary])
        frequency = 1 / numbers / (1 / np.arange(1, types + 1)).sum()
        assert np.allclose(corpus.counts / words, frequency, atol=0.002)
        assert sorted(numbers) == list(range(1, types + 1))
        passages = list(passages_of(corpus, 63_000))
        assert sum(passage.corpus_words for passage in passages) == words
        counted = np.bincount(np.concatenate([passage.words for passage in passages]), minlength=types)
        assert counted.tolist() == corpus.counts.tolist()
        (whole,) = passages_of(corpus, 1 << 20)
        assert np.bincount(whole.sentences).tolist() == [20] * 10_000 + [5]


def test_generated_words_are_decided_by_their_seed():
    def words(seed):
        with Corpus.generated(5000, types=50, seed=seed) as corpus:
            return [corpus.vocabulary[word] for passage in passages_of(corpus) for word in passage.words]

    assert words(3) == words(3)
    assert words(3) != words(4)


def test_too_few_generated_words_are_an_error():
    with pytest.raises(CorpusError, match=r"min_count=5 leaves 1 of the 9 words of 9 generated words"):
        Corpus.generated(9, types=9)


@pytest.mark.parametrize("blank", ["\n", " \n", "\r\n", "\t\n\n"], ids=["empty", "space", "return", "tab"])
def test_empty_lines_take_no_room(blank, tmp_path):
    """A small gzip file may become gigabytes of them; and they are no sentences."""
    path, plain = tmp_path / "bomb.txt.gz", tmp_path / "plain.txt"
    path.write_bytes(gzip.compress(("a b c\n" + blank * 500_000 + "c d a\n" + blank * 1_500_000).encode()))
    plain.write_text("a b c\nc d a\n")
    with Corpus(path, min_count=1) as bomb, Corpus(plain, min_count=1) as usual:
        assert bomb.nbytes == usual.nbytes
        assert bomb.corpus_words == 6
        (ours,), (theirs,) = passages_of(bomb), passages_of(usual)
        assert np.array_equal(ours.words, theirs.words)
        assert np.array_equal(np.diff(ours.sentences), np.diff(theirs.sentences))


def test_gzip_that_becomes_far_larger_is_refused(tmp_path):
    """Before it has filled the disk; unpacked, the user has seen how large it is."""
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(b"a b " * 20_000_000))
    with pytest.raises(CorpusError, match="becomes more than 200 times as large; if that is right, unpack it first"):
        Corpus(path)


def test_gzip_that_is_honestly_large_is_read(tmp_path):
    """A few times its size, and more than what is read of any file: three parts of 16 MiB, one after the other."""
    path = tmp_path / "long.txt.gz"
    letters = np.random.default_rng(0).integers(97, 123, 2**24, np.uint8)
    letters[::6] = 32
    letters[::60] = 10
    path.write_bytes(gzip.compress(letters.tobytes(), 1) * 3)
    assert sum(map(len, read_characters(path))) == 3 * 2**24


# ---- words forgotten while counting; many files ----------------------------------------------------------------------


def zipf_words(count, seed=0):
    ranks = np.random.default_rng(seed).zipf(1.2, count)
    return [f"w{rank}" for rank in ranks.tolist()]


@pytest.mark.parametrize("max_types", [2, 20, 300])
def test_counts_lack_at_most_what_is_said(tmp_path, monkeypatch, max_types):
    """No count is too low by more than ``missed``, at most the words of the corpus / max_types; none is too high."""
    monkeypatch.setattr("speedswap.apps.word2vec.corpus.CHUNK_CHARACTERS", 500)
    words = zipf_words(20_000)
    true = Counter(words)
    path = written(tmp_path, words, 20)
    with Corpus(path, min_count=1, max_types=max_types) as corpus:
        counted = dict(zip(corpus.vocabulary, corpus.counts.tolist(), strict=True))
        assert 0 < corpus.missed <= len(words) / max_types
        assert len(counted) <= max_types + 500
        assert all(true[word] - corpus.missed <= counted.get(word, 0) <= true[word] for word in true)
        assert corpus.corpus_words == len(words)


def test_words_that_were_kept_stand_where_they_stood(tmp_path, monkeypatch):
    """Though the others were forgotten, and all were numbered again, many times."""
    monkeypatch.setattr("speedswap.apps.word2vec.corpus.CHUNK_CHARACTERS", 500)
    monkeypatch.setattr("speedswap.apps.word2vec.corpus.CHUNK_WORDS", 333)
    words = zipf_words(10_000)
    path = written(tmp_path, words, 7)
    with Corpus(path, min_count=1) as whole, Corpus(path, min_count=1, max_types=50) as pruned:
        assert pruned.missed > 10
        true = dict(zip(whole.vocabulary, whole.counts, strict=True))
        counted = zip(pruned.vocabulary, pruned.counts, strict=True)
        complete = {word for word, count in counted if count == true[word]}
        assert len(complete) > 5
        found, expected = (
            [[word for word in sentence if word in complete] for sentence in sentences_of(corpus, 1 << 20)]
            for corpus in (pruned, whole)
        )
        assert [each for each in found if each] == [each for each in expected if each]
        assert sum(len(each) for each in sentences_of(pruned, 1 << 20)) == pruned.counts.sum()


def test_several_files_are_read_one_after_the_other(tmp_path):
    """Named, or by a pattern; plain, gzip and Parquet, whose rows without text are left out."""
    (tmp_path / "a.txt").write_text("one two\nthree two")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"four two"))
    text = pa.array(["five two", None, "six two\nseven two"], pa.string_view())
    rows = pa.table({"id": [1, 2, 3], "text": text, "title": ["x", "y", "z"]})
    parquet.write_table(rows, tmp_path / "c.parquet")
    files = [tmp_path / name for name in ("a.txt", "b.gz", "c.parquet")]
    expected = ["one two", "three two", "four two", "five two", "six two", "seven two"]
    for given in (files, tmp_path / "*", [tmp_path / "a*", tmp_path / "[bc].*"]):
        with Corpus(given, min_count=1) as corpus:
            assert sorted(map(" ".join, sentences_of(corpus, 1 << 20))) == sorted(expected)
            assert corpus.counts[corpus.vocabulary.index("two")] == 6
    with Corpus(tmp_path / "b.gz", min_count=1) as corpus:
        assert corpus.path == tmp_path / "b.gz"


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"a": ["x"], "b": ["y"]}, r"has columns of strings: a, b; name the one to read 'text'"),
        ({"a": [1]}, r"has columns of strings: none"),
        (
            {"a": pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))},
            "has contents that are not read .*: give UTF-8 text",
        ),
    ],
)
def test_parquet_without_a_clear_column_is_refused(tmp_path, columns, message):
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(CorpusError, match=message):
        Corpus(tmp_path / "rows.parquet")


def test_what_is_no_parquet_and_patterns_without_files_are_refused(tmp_path):
    (tmp_path / "text.parquet").write_text("PAR1, damaged")
    with pytest.raises(CorpusError, match="is not a whole Parquet file"):
        Corpus(tmp_path / "text.parquet")
    with pytest.raises(CorpusError, match=r"nothing\*\.txt matches no file"):
        Corpus(tmp_path / "nothing*.txt")

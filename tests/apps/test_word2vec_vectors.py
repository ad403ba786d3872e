"""Trained vectors are searched, compared and saved as NumPy, SciPy and gensim would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import speedswap
from speedswap.apps.errors import PairsError
from speedswap.apps.word2vec import WordVectors
from speedswap.apps.word2vec import vectors as module
from speedswap.apps.word2vec.vectors import rank_correlation, read_pairs


@pytest.fixture
def words():
    return [f"w{number}" for number in range(300)] + ["Köln", "o'brien"]


@pytest.fixture
def vectors(words):
    init = speedswap.init.normal(0.0, 1.0)
    return WordVectors(words, speedswap.Table.create(len(words), 7, storage="pageable", init=init, seed=3))


@pytest.fixture
def matrix(vectors):
    return vectors.table.gather(torch.arange(len(vectors))).weight.numpy()


def test_a_word_is_its_row(vectors, matrix, words):
    assert len(vectors) == len(words)
    assert "w17" in vectors
    assert "w300" not in vectors
    assert np.array_equal(vectors["Köln"], matrix[300])
    with pytest.raises(KeyError, match="w300"):
        vectors["w300"]


@pytest.mark.parametrize("chunk_rows", [64, 1 << 16])
def test_nearest_are_those_of_a_full_sort(vectors, matrix, words, monkeypatch, chunk_rows):
    """The same through a table read in one piece or in five."""
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk_rows)
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    cosines = unit @ unit[5]
    expected = [row for row in np.argsort(-cosines) if row != 5][:10]
    found = vectors.nearest("w5", 10)
    assert [word for word, _ in found] == [words[row] for row in expected]
    assert [cosine for _, cosine in found] == pytest.approx(cosines[expected], abs=1e-6)


def test_nearest_of_a_small_vocabulary_are_all_the_others():
    table = speedswap.Table.create(3, 2, storage="pageable")
    table.scatter(torch.arange(3), torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]))
    found = WordVectors(["a", "b", "c"], table).nearest("a")
    assert found == [("b", pytest.approx(0.5**0.5)), ("c", pytest.approx(-1.0))]


def test_rank_correlation_by_hand():
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 90.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, -7.0])) == pytest.approx(-1)
    assert np.isnan(rank_correlation(np.array([1.0, 2.0]), np.array([5.0, 5.0])))


def test_rank_correlation_is_scipys_with_ties_too():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for _ in range(20):
        left, right = rng.normal(size=40), rng.integers(0, 6, 40).astype(float)
        assert rank_correlation(left, right) == pytest.approx(stats.spearmanr(left, right).statistic, abs=1e-12)


def test_similarity_says_how_many_pairs_it_knows(vectors, matrix, tmp_path):
    """A heading and a comment are skipped; unknown words are left out; words are tried with their capitals first."""
    pairs = tmp_path / "people.txt"
    pairs.write_text("one\ttwo\tscore\n# more\nw1\tw2\t3.5\nW3\tKöln\t1\nw5\tunknown\t9\nw6\tw7\t2.5\textra\n")
    result = vectors.similarity(pairs)
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    ours = np.array([unit[1] @ unit[2], unit[3] @ unit[300], unit[6] @ unit[7]])
    assert (result.name, result.known, result.total) == ("people", 3, 4)
    assert result.spearman == pytest.approx(rank_correlation(ours, np.array([3.5, 1.0, 2.5])))
    assert str(result).endswith("on 3 of 4 pairs")


def test_similarity_without_known_pairs_is_not_a_number(vectors, tmp_path):
    pairs = tmp_path / "others.txt"
    pairs.write_text("cat\tdog\t3.5\n")
    result = vectors.similarity(pairs)
    assert np.isnan(result.spearman)
    assert (result.known, result.total) == (0, 1)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has no line"),
        (b"# only\n", "has no line"),
        (b"a\tb\t1\nc d 2\n", "line 2: 'c d 2' is not word, tab"),
        (b"a\tb\t1\nc\td\tx\n", "line 2"),
        (b"a\tb\t1\nc\td\tnan\n", "line 2"),
        (b"a\tb\t1\nc\td\t-inf\n", "line 2"),
        (b"\xff\xff", "cannot be read"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path, content, message):
    path = tmp_path / "pairs.txt"
    path.write_bytes(content)
    with pytest.raises(PairsError, match=message):
        read_pairs(path)


def test_saved_vectors_open_in_gensim(vectors, matrix, words, tmp_path):
    keyed = pytest.importorskip("gensim.models").KeyedVectors
    vectors.save(tmp_path / "vectors.txt")
    theirs = keyed.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert theirs.index_to_key == words
    assert np.allclose(theirs.vectors, matrix, rtol=1e-5, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.txt"]


def test_a_failed_save_leaves_the_file_as_it_was(vectors, tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("before")
    vectors.table.close()
    with pytest.raises(speedswap.errors.SpeedswapError):
        vectors.save(path)
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.txt"]

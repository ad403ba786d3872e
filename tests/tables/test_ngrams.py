"""Rows of n-grams: equal to a plain loop, apart at borders, and spread like chance."""

from __future__ import annotations

import re
from functools import cache
from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speedswap
from speedswap.errors import IdError
from speedswap.tables import ngram_rows, token_classes

MOST = 2**31 - 2  # the largest token


@cache
def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def plain_rows(
    tokens: list[int], orders: tuple[int, ...], heads: int, num_rows: int, seed: int, documents: list[int]
) -> list[list[int]]:
    """Return the rows of one text as the docstring defines them, one n-gram after another."""
    each = num_rows // (len(orders) * heads)
    primes = [number for number in range(each, max(1, each - 300), -1) if is_prime(number)]
    rows = []
    for position in range(len(tokens)):
        of_position = []
        for place, order in enumerate(orders):
            begin = position
            while begin > 0 and position - begin + 1 < order and documents[begin - 1] == documents[begin]:
                begin -= 1
            for head in range(heads):
                value = 0
                for back in range(position - begin + 1):
                    digest = blake2b(f"{seed} {order} {head} {back}".encode(), digest_size=4).digest()
                    value ^= (tokens[position - back] + 1) * (int.from_bytes(digest, "little") | 1)
                hash_number = place * heads + head
                of_position.append(hash_number * each + value % primes[hash_number])
        rows.append(of_position)
    return rows


def test_a_tiny_text() -> None:
    """Rows are part of trained tables: these values must never change."""
    found = ngram_rows(torch.tensor([5, 7, 5, 7]), (1, 2), heads=2, num_rows=400)
    assert found.tolist() == plain_rows([5, 7, 5, 7], (1, 2), 2, 400, 0, [0] * 4)
    assert found.tolist() == [[45, 102, 276, 360], [60, 162, 238, 311], [45, 102, 200, 363], [60, 162, 238, 311]]


@given(st.data())
def test_rows_equal_those_of_a_plain_loop(data: st.DataObject) -> None:
    """With borders anywhere, any orders, tokens up to the largest, and windows shorter than an n-gram."""
    time, batch = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    token = st.one_of(st.integers(0, 3), st.integers(MOST - 2, MOST))
    tokens = [data.draw(st.lists(token, min_size=time, max_size=time)) for _ in range(batch)]
    documents = [data.draw(st.lists(st.integers(0, 1), min_size=time, max_size=time)) for _ in range(batch)]
    orders = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)))
    heads, seed = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 1, 2**64 - 1]))
    num_rows = data.draw(st.sampled_from([300, 10_007]))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    found = ngram_rows(
        torch.tensor(tokens, dtype=dtype).view(batch, time),
        orders,
        heads,
        num_rows=num_rows,
        seed=seed,
        document_ids=torch.tensor(documents, dtype=torch.int64).view(batch, time),
    )
    assert found.shape == (batch, time, len(orders) * heads)
    assert found.dtype == torch.int64
    expected = [
        plain_rows(text, orders, heads, num_rows, seed, ids) for text, ids in zip(tokens, documents, strict=True)
    ]
    assert found.tolist() == expected


def test_no_product_leaves_63_bits() -> None:
    """The largest token times the largest multiplier, in whole numbers without bounds."""
    assert (MOST + 1) * (2**32 - 1) < 2**63


def test_a_text_has_the_same_rows_packed_as_alone(device: str) -> None:
    """Documents one after the other, of which two equal neighbours differ only by their numbers."""
    documents = [torch.tensor(text, device=device) for text in ([1, 2, 3], [1, 2, 3], [4], [1, 2])]
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 3, 1, 2])).to(device)
    packed = ngram_rows(torch.cat(documents), num_rows=10**6, document_ids=numbers)
    assert torch.equal(packed, torch.cat([ngram_rows(each, num_rows=10**6) for each in documents]))
    assert packed.device.type == device


def test_a_document_in_two_parts_is_not_joined_across_another() -> None:
    """The trigram at the last token would be (1, 2, 3), had document 0 gone on."""
    tokens = torch.tensor([1, 2, 3])
    apart = ngram_rows(tokens, num_rows=10**6, document_ids=torch.tensor([0, 1, 0]))
    assert torch.equal(apart[-1], ngram_rows(tokens[-1:], num_rows=10**6)[0])


def test_a_window_with_the_tokens_before_it_has_the_rows_of_the_whole_text() -> None:
    tokens = torch.randint(50, (40,), generator=torch.Generator().manual_seed(0))
    whole = ngram_rows(tokens, (2, 4), 3, num_rows=10**5)
    for first in (3, 10, 30):
        window = tokens[first - 3 : first + 10]
        assert torch.equal(ngram_rows(window, (2, 4), 3, num_rows=10**5)[3:], whole[first : first + 10])


def test_every_head_has_its_own_rows_within_the_table() -> None:
    tokens = torch.randint(1000, (100_000,), generator=torch.Generator().manual_seed(0))
    num_rows = 16 * 500 + 15
    rows = ngram_rows(tokens, num_rows=num_rows)
    assert rows.amin(0).tolist() == [500 * number for number in range(16)]
    primes = [number for number in range(500, 0, -1) if is_prime(number)][:16]
    assert (rows.amax(0) - rows.amin(0) + 1).tolist() == primes


@pytest.mark.parametrize("order", [2, 3])
def test_rows_are_spread_like_chance(order: int) -> None:
    """Pearson's statistic over the rows of each head lies within 5 deviations, for n-grams of neighbouring tokens."""
    side = {2: 400, 3: 54}[order]
    grams = torch.cartesian_prod(*[torch.arange(side)] * order)
    for seed in range(3):
        rows = ngram_rows(grams, (order,), 4, num_rows=4 * 10_000, seed=seed)[:, -1]
        for head, column in enumerate(rows.T):
            counts = torch.bincount(column - 10_000 * head)
            expected = len(grams) / len(counts)
            statistic = float(((counts - expected) ** 2 / expected).sum())
            freedom = len(counts) - 1
            assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5, (seed, head, statistic, freedom)


def test_grams_that_collide_in_one_head_are_apart_in_another() -> None:
    """Some 80,000 pairs of bigrams collide in the first head; in the second as rarely as any two do."""
    grams = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    first, second = ngram_rows(grams, (2,), 2, num_rows=2 * 10_000)[:, -1].T
    order = first.argsort()
    collide = first[order][1:] == first[order][:-1]
    again = (second[order][1:] == second[order][:-1]) & collide
    assert int(collide.sum()) > 20_000
    assert int(again.sum()) < 20


def test_seeds_give_different_rows_and_equal_seeds_equal_ones() -> None:
    tokens = torch.arange(1000)
    first, again, other = (ngram_rows(tokens, num_rows=10**7, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert float((first == other).double().mean()) < 0.01


def test_a_billion_rows() -> None:
    rows = ngram_rows(torch.arange(10_000), num_rows=10**9)
    assert int(rows.max()) > 0.99 * 10**9
    assert int(rows.max()) < 10**9


def test_rows_train_a_table() -> None:
    rows = ngram_rows(torch.tensor([[5, 7, 5, 7]]), num_rows=10_000)
    memory = speedswap.Embedding(10_000, 4)
    assert memory(rows).flatten(-2).shape == (1, 4, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": [1, 2]}, TypeError, "tokens is a list; give a tensor of integers"),
        ({"tokens": torch.ones(3)}, TypeError, "tokens is of torch.float32; give a tensor of integers, such as int64"),
        ({"tokens": torch.tensor(3)}, ValueError, "tokens is a single number"),
        ({"tokens": torch.tensor([1, -100])}, IdError, "tokens has -100; give tokens from 0 to 2147483646"),
        ({"tokens": torch.tensor([1, MOST + 1])}, IdError, "tokens has 2147483647; give tokens from 0 to 2147483646"),
        ({"orders": ()}, ValueError, r"orders is \(\); give at least one length"),
        ({"orders": (2, 2)}, ValueError, r"orders is \(2, 2\); give at least one length of n-grams, and none twice"),
        ({"orders": (0,)}, ValueError, "each of orders is 0; give a whole number of at least 1"),
        ({"heads": 0}, ValueError, "heads is 0; give a whole number of at least 1"),
        ({"num_rows": 0}, ValueError, "num_rows is 0; give a whole number of at least 1"),
        ({"num_rows": 100}, ValueError, "num_rows is 100, which leaves 6 rows to each of 16 hashes"),
        ({"seed": -1}, ValueError, "seed is -1; give a whole number from 0"),
        ({"document_ids": torch.zeros(2, dtype=torch.int64)}, ValueError, r"document_ids has shape \(2,\); give one"),
        ({"document_ids": torch.zeros(3)}, TypeError, "document_ids is of torch.float32"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    given_by_default = {"tokens": torch.tensor([1, 2, 3]), "num_rows": 10**6}
    with pytest.raises(error, match=re.compile(message)):
        ngram_rows(**{**given_by_default, **arguments})  # type: ignore[arg-type]


def test_texts_that_differ_in_form_are_one_class() -> None:
    """A fullwidth letter, capitals, an accent in one character or two, ligatures and spaces."""
    alike = ["fine", " Fine", "FINE", "ﬁne", "\uff46ine", "fi\u0301ne", "f\u00edne"]
    assert token_classes([*alike, "fin"]).tolist() == [0] * 7 + [1]


def test_texts_that_have_no_form_but_space_stay_apart() -> None:
    """As do parts of characters, which all decode to U+FFFD."""
    assert token_classes([" ", "\n", "", "\ufffd", " \ufffd", "\u0301"]).tolist() == [0, 1, 2, 3, 4, 5]
    assert token_classes([]).shape == (0,)

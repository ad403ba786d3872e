"""Rows of n-grams: hashes of the last tokens up to each one, for a language model's memory."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.tables.record import count, seed_of

_MOST_TOKENS = 2**31 - 1  # a token + 1, times a multiplier of 32 bits, stays below 2^63


def ngram_rows(
    tokens: Tensor,
    orders: Sequence[int] = (2, 3),
    heads: int = 8,
    *,
    num_rows: int,
    seed: int = 0,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Return the rows of the n-grams that end at each token, for a table that serves as a language model's memory.

    The n-gram of order n at a position is the token there and the n - 1 before it. Each of its heads hashes it into
    rows that no other order or head has, so that n-grams which collide in one head differ in the others (Cheng et al.,
    Conditional memory via scalable lookup, 2026, arXiv:2601.07372). Rows depend on these arguments alone, the same on
    every machine and device.

    Before the first token, and before a document's first, there is nothing: n-grams there have rows that stand for a
    shorter n-gram at a beginning. So give a window of a longer text with the ``max(orders) - 1`` tokens before it, and
    drop their rows.

    A head's hash is ((t₀ + 1) · m₀ xor (t₁ + 1) · m₁ xor …) mod p, where tᵢ is the token i places before; 0 replaces
    tᵢ + 1 before a beginning. Multiplier mᵢ is the BLAKE2b digest, of 4 bytes, little-endian, of
    ``f"{seed} {order} {head} {i}"``, made odd. The primes p are the largest up to num_rows // (len(orders) · heads), in
    falling order. No product exceeds 63 bits.

    Args:
        tokens: shape (*batch, time), any dtype of integers, from 0 to 2**31 - 2; on any device, where a GPU is waited
            for. Give ``token_classes(texts)[tokens]`` for n-grams that ignore case and the like.
        orders: lengths of the n-grams, at least 1, none twice.
        heads: hashes per order.
        num_rows: of the table, for all orders and heads together; they share it equally.
        seed: of the hashes, from 0 to 2**64 - 1.
        document_ids: shape of ``tokens``, integers on the same device: a document begins where the number changes, and
            no n-gram reaches across. If a token marks the beginnings: ``(tokens == begin).cumsum(-1)``.

    Returns:
        int64, shape (*batch, time, len(orders) · heads), on the tokens' device: for each order in turn a row per head,
        to be looked up by a :class:`speedswap.Embedding` of ``num_rows`` rows and announced to
        :func:`speedswap.lookahead`.

    Raises:
        IdError: a token is out of range.
        TypeError: tokens or document_ids are not a tensor of integers.
        ValueError: another argument is out of range, or num_rows is too small for different primes.

    Example:
        >>> import torch
        >>> from speedswap.tables import ngram_rows
        >>> rows = ngram_rows(torch.tensor([[5, 7, 5, 7]]), num_rows=1_000_000)
        >>> rows.shape
        torch.Size([1, 4, 16])
        >>> (rows[0, 1] == rows[0, 3]).sum()  # the pair (5, 7) twice: all 8 heads of order 2, none of order 3
        tensor(8)
    """
    _require_integers("tokens", tokens)
    if tokens.ndim == 0:
        raise ValueError("tokens is a single number; give a tensor whose last dimension is time, e.g. tokens[None]")
    orders = tuple(count("each of orders", order) for order in orders)
    if not orders or len(set(orders)) < len(orders):
        raise ValueError(f"orders is {orders}; give at least one length of n-grams, and none twice")
    family = _hashes(orders, count("heads", heads), count("num_rows", num_rows), seed_of(seed))
    codes = tokens.long() + 1
    continues = _continues(tokens, document_ids)
    if codes.numel():
        least, most = (int(code) - 1 for code in codes.aminmax())
        if least < 0 or most >= _MOST_TOKENS:
            raise IdError(
                f"tokens has {least if least < 0 else most}; give tokens from 0 to {_MOST_TOKENS - 1}, "
                "and a separate one to padding"
            )
    multipliers, primes, first_rows = (torch.tensor(part, device=tokens.device) for part in family)
    hashed = codes[..., None] * multipliers[0]
    for more in multipliers[1:]:
        before = torch.zeros_like(codes)
        before[..., 1:] = codes[..., :-1] if continues is None else codes[..., :-1] * continues
        codes = before
        hashed ^= codes[..., None] * more
    return hashed.remainder_(primes).add_(first_rows)


def token_classes(texts: Iterable[str]) -> Tensor:
    """Return a number for each token of a vocabulary, equal for tokens whose texts differ only in form.

    Texts are compared without case, accents, variants such as full width (Unicode's NFKD) and space around them. Texts
    of nothing but space, and those with U+FFFD, which stands for part of a character, are compared as they are.

    Args:
        texts: the text of each token, as ``tokenizer.decode([token])`` returns it.

    Returns:
        int64, shape (len(texts),), on the CPU: classes numbered from 0 in order of first occurrence.

    Example:
        >>> from speedswap.tables import token_classes
        >>> token_classes(["the", " The", "THE", "café", "cafe", " ", "\\n"])
        tensor([0, 0, 0, 1, 1, 2, 3])
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(_plain(text), len(numbers)) for text in texts], dtype=torch.int64)


def _plain(text: str) -> str:
    if "\ufffd" in text:
        return text
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(char for char in decomposed if not unicodedata.combining(char)).strip() or text


class _Hashes(NamedTuple):
    """A family of hashes of n-grams, in numbers."""

    multipliers: list[list[int]]  # (longest order, hashes); 0 beyond a hash's order
    primes: list[int]
    first_rows: list[int]


@lru_cache(maxsize=32)
def _hashes(orders: tuple[int, ...], heads: int, num_rows: int, seed: int) -> _Hashes:
    number = len(orders) * heads
    each = num_rows // number
    primes = _primes(each, number)
    if len(primes) < number:
        raise ValueError(
            f"num_rows is {num_rows}, which leaves {each} rows to each of {number} hashes (orders times heads): too "
            f"few for {number} different primes; give more rows, or fewer heads"
        )
    multipliers = [
        [_multiplier(seed, order, head, place) if place < order else 0 for order in orders for head in range(heads)]
        for place in range(max(orders))
    ]
    return _Hashes(multipliers, primes, [hash * each for hash in range(number)])


def _multiplier(seed: int, order: int, head: int, place: int) -> int:
    """Return an odd number of 32 bits."""
    digest = blake2b(f"{seed} {order} {head} {place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") | 1


def _primes(most: int, wanted: int) -> list[int]:
    """Return the largest primes up to ``most``, as many as wanted if there are."""
    found: list[int] = []
    for number in range(most, 1, -1):
        if len(found) == wanted:
            break
        if (number % torch.arange(2, math.isqrt(number) + 1, device="cpu")).all():
            found.append(number)
    return found


def _require_integers(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {a_kind(value)}; give a tensor of integers")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} is of {value.dtype}; give a tensor of integers, such as int64")


def _continues(tokens: Tensor, document_ids: Tensor | None) -> Tensor | None:
    """Return whether each position but the first is in the document of the one before; None for a single document."""
    if document_ids is None:
        return None
    _require_integers("document_ids", document_ids)
    if document_ids.shape != tokens.shape:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}; give one per token, shape {tuple(tokens.shape)}"
        )
    if document_ids.device != tokens.device:
        raise ValueError(f"document_ids is on {document_ids.device}; move it to the tokens' device, {tokens.device}")
    return document_ids[..., 1:] == document_ids[..., :-1]

"""Keys, as numbers and texts that the loops of an id map read; and n-grams of tokens, as rows."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.tables.record import count, seed_of

KINDS = ("int64", "hashed", "exact")
_ARROW_STRINGS = {
    "string": torch.int32,
    "binary": torch.int32,
    "large_string": torch.int64,
    "large_binary": torch.int64,
}


class Keys(NamedTuple):
    """A batch of keys.

    Attributes:
        numbers: int64, shape (n,), in host memory: the keys themselves, or the hashes of strings.
        shape: the shape of the rows they map to.
        device: the device of those rows.
        texts: the bytes of exact strings.
    """

    numbers: Tensor
    shape: tuple[int, ...]
    device: torch.device
    texts: kernels.Texts | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def copied(self) -> Keys:
        """Return the same keys, with their numbers in separate memory."""
        return Keys(self.numbers.clone(), self.shape, self.device, self.texts)


_CPU = torch.device("cpu")


def as_keys(keys: Any, kind: str) -> Keys:
    """Return keys in the form that the map's loops read; keys in this form are returned unchanged.

    Args:
        keys: for ``"int64"``, integers of any shape: a tensor, or anything that NumPy turns into an array; otherwise
            strings: a sequence of str or bytes, a NumPy array of any shape, a pyarrow array, or a pandas or polars
            column. NumPy's fixed-width strings and pyarrow's are read in place.
        kind: ``"int64"``, ``"hashed"`` or ``"exact"``.

    Raises:
        TypeError: ``keys`` has another type.
        ValueError: a key is missing.
    """
    if isinstance(keys, Keys):
        return keys
    keys = _as_array(keys)
    if kind == "int64":
        return _as_numbers(keys)
    texts, shape = _as_text(keys)
    return Keys(kernels.hash_texts(texts), shape, _CPU, texts if kind == "exact" else None)


def is_single_key(value: Any) -> bool:
    """Return whether a value is a single (perhaps missing) key rather than several."""
    return value is None or isinstance(value, (str, bytes, int, float, np.generic)) or _is_missing(value)


def _as_array(keys: Any) -> Any:
    """Return an array or column of keys as a NumPy array; tensors and pyarrow strings are left as they are.

    Raises:
        TypeError: a key is a tuple, of pandas.
        ValueError: a key is missing, according to the mask of the array or column.
    """
    if isinstance(keys, (Tensor, list, tuple)):
        return keys
    if getattr(keys, "nlevels", 1) > 1:
        raise TypeError(f"keys is {a_kind(keys)}; give one of its levels, or a string per key")
    if hasattr(keys, "combine_chunks"):
        keys = keys.combine_chunks()  # of a chunked array
    # pandas; then polars and pyarrow, whose arrays mostly know that nothing is missing.
    find_missing = getattr(keys, "isna", None) or (getattr(keys, "null_count", 1) and getattr(keys, "is_null", None))
    mask = np.asarray(find_missing()) if find_missing else np.ma.getmaskarray(keys) if np.ma.isMA(keys) else None
    if mask is not None and mask.any():
        _refuse_missing(np.argwhere(mask)[0], int(mask.sum()))
    return keys if _is_arrow_text(keys) or not hasattr(keys, "__array__") else np.asarray(keys)


def _is_arrow_text(keys: Any) -> bool:
    return str(getattr(keys, "type", "")) in _ARROW_STRINGS


def _is_missing(value: Any) -> bool:
    kind = type(value).__name__
    return value is None or kind in ("NAType", "NaTType") or (isinstance(value, (float, np.generic)) and value != value)


def _refuse_first_missing(keys: NDArray[Any]) -> None:
    place = next((place for place, key in np.ndenumerate(keys) if _is_missing(key)), None)
    if place is not None:
        _refuse_missing(place)


def _refuse_missing(place: Iterable[Any], count: int = 1) -> NoReturn:
    others = f", and {count - 1} more are" if count > 1 else ""
    raise ValueError(
        f"keys[{', '.join(map(str, place))}] is missing{others}; leave out what has no key, or give missing values "
        'one: with fillna("") or fillna(-1) in pandas, fill_null in polars and pyarrow'
    )


def _as_numbers(keys: Any) -> Keys:
    if isinstance(keys, (list, tuple, range, int)) or (isinstance(keys, np.ndarray) and keys.dtype.kind == "O"):
        given = keys.tolist() if isinstance(keys, np.ndarray) else keys
        try:
            keys = np.asarray(given)
        except ValueError as error:
            raise ValueError(
                f"keys is {a_kind(given)} without a shape ({error}); give lists of one length, or one list of all keys"
            ) from error
        keys = _unsigned(keys, given) if keys.size else keys.astype(np.int64)
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu":
        keys = keys.astype(keys.dtype.newbyteorder("="), copy=False)
        keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys
        keys = torch.from_numpy(np.require(keys, requirements=["C", "W"]))  # torch warns about read-only memory
    if not isinstance(keys, Tensor):
        _refuse_numbers(keys)
    kernels.require_dense(keys, "keys")
    keys = keys.view(torch.int64) if keys.dtype == torch.uint64 else keys
    if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        raise TypeError(f"keys has dtype {keys.dtype}; give integers, int64 or narrower")
    return Keys(kernels.as_ids(keys.detach()).reshape(-1), tuple(keys.shape), keys.device)


def _unsigned(keys: NDArray[Any], given: Any) -> NDArray[Any]:
    """Return whole numbers as unsigned if some exceed int64, where NumPy would make floats; otherwise ``keys``."""
    if keys.dtype == np.float64:
        whole = np.asarray(given, dtype=object)
        if all(isinstance(each, int | np.integer) and each >= 0 for each in whole.flat):
            return whole.astype(np.uint64)
    return keys


def _refuse_numbers(keys: Any) -> NoReturn:
    if not isinstance(keys, np.ndarray):
        raise TypeError(f'keys is {a_kind(keys)}; give integers, or make the map with keys="hashed" for strings')
    if keys.dtype.kind in "fmMO":
        _refuse_first_missing(keys)
    raise TypeError(
        f"keys has dtype {keys.dtype}; give integers, int64 or narrower, or for strings make the map with "
        'keys="hashed" or keys="exact"'
    )


def _as_text(keys: Any) -> tuple[kernels.Texts, tuple[int, ...]]:
    """Return the bytes of strings, and their shape."""
    if _is_arrow_text(keys):
        return _arrow_text(keys), (len(keys),)
    if isinstance(keys, np.ndarray):
        if keys.dtype.kind in "US":
            return kernels.texts_of_fixed(keys.astype(keys.dtype.newbyteorder("="), copy=False)), keys.shape
        if keys.dtype.kind in "OT":
            return _texts_of(keys.reshape(-1).tolist(), keys.shape), keys.shape
    if isinstance(keys, (list, tuple)):
        return _texts_of(keys, (len(keys),)), (len(keys),)
    what = f"an array of {keys.dtype}" if isinstance(keys, np.ndarray) else a_kind(keys)
    raise TypeError(
        f'keys is {what}; give a list, an array or a column of strings, or for integers make the map with keys="int64"'
    )


def _texts_of(strings: Sequence[Any], shape: tuple[int, ...]) -> kernels.Texts:
    try:
        return kernels.texts_of(strings)
    except TypeError:
        found = np.empty(len(strings), object)
        found[:] = strings
        _refuse_first_missing(found.reshape(shape))
        raise


def _arrow_text(keys: Any) -> kernels.Texts:
    """Return the bytes of a pyarrow string array, which may be a slice of a longer one."""
    _, offsets, text = keys.buffers()
    dtype = _ARROW_STRINGS[str(keys.type)]
    if not len(keys):
        return torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    begins = torch.frombuffer(offsets, dtype=dtype, count=keys.offset + len(keys) + 1)[keys.offset :].long()
    first, last = int(begins[0]), int(begins[-1])
    nothing = torch.empty(0, dtype=torch.uint8)
    return (torch.frombuffer(text, dtype=torch.uint8)[first:last] if last > first else nothing), begins - first


def select_texts(texts: kernels.Texts, places: Tensor) -> kernels.Texts:
    """Select strings by their indices ``places``, int64, shape (n,), in that order.

    >>> text, offsets = select_texts(kernels.texts_of(["ab", "c", "def"]), torch.tensor([2, 0]))
    >>> bytes(text.numpy()), offsets.tolist()
    (b'defab', [0, 3, 5])
    """
    text, offsets = (each.numpy() for each in texts)
    begins, lengths = offsets[:-1][places.numpy()], np.diff(offsets)[places.numpy()]
    ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    shifts = np.repeat(begins - ends[:-1], lengths)
    return torch.from_numpy(text[shifts + np.arange(len(shifts))]), torch.from_numpy(ends)


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


@lru_cache(maxsize=32)
def _hashes(
    orders: tuple[int, ...], heads: int, num_rows: int, seed: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return hashes of n-grams in numbers: multipliers, 0 beyond a hash's order; primes; and first rows."""
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
    return multipliers, primes, [hash * each for hash in range(number)]


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

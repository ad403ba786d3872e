"""NumPy model of compact columns: rounding in exact arithmetic, and the random words that decide it."""

from __future__ import annotations

import numpy as np

MASK = np.uint64(2**32 - 1)


def philox4x32(counter: list[np.ndarray], key: int, rounds: int) -> list[np.ndarray]:
    """Compute Philox4x32 for arrays of counters, as in the paper; each word is a uint64 below 2**32."""
    c = [np.asarray(word, np.uint64) for word in counter]
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(low),
            second & MASK,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(high),
            first & MASK,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c


def drawn(form: str, key: int, rows: np.ndarray, width: int) -> np.ndarray:
    """Return the random bits of each value, (rows, width): 16 of them for bfloat16, 32 for float16."""
    per_draw = 8 if form == "bfloat16" else 4
    draws = -(-width // per_draw)
    row = np.asarray(rows).astype(np.uint64)[:, None] + np.zeros((1, draws), np.uint64)
    draw = np.zeros_like(row) + np.arange(draws, dtype=np.uint64)
    words = np.stack(philox4x32([draw, row & MASK, row >> np.uint64(32), np.zeros_like(row)], key, 7), -1)
    if form == "bfloat16":
        words = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1)
    return words.reshape(len(row), -1)[:, :width].astype(np.int64)


def narrow(form: str, values: np.ndarray, key: int | None, rows: np.ndarray) -> np.ndarray:
    """Return the 16 bits that hold each float32 value, (rows, width); no value is NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
    if key is None and form == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if form == "bfloat16":
        low = bits & 0xFFFF
        tie_goes_up = (bits >> 16) & 1
        up = low + tie_goes_up > 0x8000 if key is None else low + drawn(form, key, rows, values.shape[1]) >= 2**16
        return ((bits >> 16) + up).astype(np.uint16)
    # float16, stochastically: whole units, and a fraction that is the chance to round up.
    size = np.abs(values.astype(np.float64))
    exponent = np.maximum(np.frexp(size)[1] - 1, -14)
    exponent[~np.isfinite(size)] = 127
    unit = np.ldexp(1.0, exponent - 10)
    drop = np.clip(13 + (-14 - (np.frexp(size)[1] - 1)), 13, 31)
    with np.errstate(invalid="ignore"):
        units = np.floor(size / unit)
        fraction = np.floor((size / unit - units) * 2.0**drop)
        noise = drawn(form, key, rows, values.shape[1]) >> (32 - drop)
        up = fraction + noise >= 2.0**drop
    with np.errstate(over="ignore"):
        rounded = np.where(np.isfinite(size), (units + up) * unit, np.inf).astype(np.float16)
    return np.where(np.signbit(values), -rounded, rounded).view(np.uint16)


def widen(form: str, halves: np.ndarray) -> np.ndarray:
    if form == "float16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def int8_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and integers of each row of finite values."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    scale = np.where(largest < 2.0**-100, np.float32(0), largest / np.float32(127)).astype(np.float32)
    quotient = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    return scale, np.rint(quotient).astype(np.int8)

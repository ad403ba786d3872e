"""The layout of staged rows: the bytes of a record that cross the bus, and each column's place among them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedswap.kernels import Part, Stored
from speedswap.kernels.cuda.engines import Packing


def test_columns_side_by_side_are_one_run():
    """Weight and two columns of state, 128 floats each: one piece of 1,536 bytes, whatever order they are asked in."""
    block = torch.empty(3, 128)
    parts = [Part(1024, block), Part(0, block), Part(512, block)]
    assert Packing.of(parts) == (1536, [(0, 1536, 0)], [1024, 0, 512])


def test_unwanted_columns_are_not_packed():
    """The second of three columns is left out; the third keeps its place in a word of 16 bytes."""
    parts = [Part(0, torch.empty(2, 10, dtype=torch.uint8)), Part(24, torch.empty(2, 2, dtype=torch.float32))]
    assert Packing.of(parts) == (32, [(0, 10, 0), (24, 8, 24)], [0, 24])


def test_compact_columns_are_packed_as_they_are_stored():
    half = Part(0, torch.empty(4, 64), Stored(torch.bfloat16))
    eighth = Part(128, torch.empty(4, 12), Stored(torch.int8))  # a scale of 4 bytes and 12 integers
    assert Packing.of([half, eighth]) == (144, [(0, 144, 0)], [0, 128])
    assert half.width + eighth.width == 144


@given(data=st.data())
def test_every_byte_of_every_column_is_found_again(data: st.DataObject):
    parts, end = [], 0
    for _ in range(data.draw(st.integers(1, 9))):
        begin = end + data.draw(st.sampled_from([0, 0, 1, 4, 16, 40]))
        width = data.draw(st.integers(1, 80))
        parts.append(Part(begin, torch.empty(1, width, dtype=torch.uint8)))
        end = begin + width
    parts = data.draw(st.permutations(parts))
    record = np.random.default_rng(0).integers(0, 256, end, np.uint8)
    packing = Packing.of(parts)
    packed = np.zeros(packing.stride, np.uint8)
    taken = np.zeros(packing.stride, int)
    for run in packing.runs:
        packed[run.packed : run.packed + run.width] = record[run.offset : run.offset + run.width]
        taken[run.packed : run.packed + run.width] += 1
    assert taken.max() == 1
    assert packing.stride % 16 == 0
    assert packing.stride < sum(part.block.shape[1] for part in parts) + 32 * len(packing.runs)
    for part, offset in zip(parts, packing.offsets, strict=True):
        width = part.block.shape[1]
        np.testing.assert_array_equal(packed[offset : offset + width], record[part.offset : part.offset + width])
        assert offset % 16 == part.offset % 16

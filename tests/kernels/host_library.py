"""The CUDA kernels as compiled by the host's compiler (host_kernels.cpp), called with NumPy arrays."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


def pointer(memory: np.ndarray | bytes) -> ctypes.c_void_p:
    """Return the address of an array, or of a kernel's structure."""
    return ctypes.cast(memory, ctypes.c_void_p) if isinstance(memory, bytes) else ctypes.c_void_p(memory.ctypes.data)


def bags_argument(names: Sequence[str], **values: int) -> bytes:
    """Return the kernels' ``Bags``, whose members have these names; what is not given is 0."""
    values["shift"] = (values["features"] - 1).bit_length()
    return struct.pack(f"{len(names)}q", *[values.get(name, 0) for name in names])


class HostKernels:
    """The library's functions, with their argument types."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        count, real, key = ctypes.c_longlong, ctypes.c_double, ctypes.c_ulonglong
        grid, address = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint], ctypes.c_void_p
        number = ctypes.c_int
        self._library.run_move.argtypes = [*grid, address, count, address, count, address, number, number, address]
        self._library.run_convert.argtypes = [
            *grid,
            address,
            count,
            address,
            count,
            address,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self._library.run_round.argtypes = [*grid, address, count, address, count, count, key]
        self._library.run_bandwidth_copy.argtypes = [ctypes.c_uint, ctypes.c_uint, address, address, count]
        self._library.run_bandwidth_rows.argtypes = [
            number, ctypes.c_uint, ctypes.c_uint, address, address, count, address, number,
        ]  # fmt: skip
        self._library.run_bags.argtypes = [*grid, address, count]
        self._library.run_idle.argtypes = [number, *grid[1:], address]
        self._library.run_adagrad.argtypes = [*grid[1:], address]
        launched = [ctypes.c_uint, ctypes.c_uint, address]
        self._library.run_admission.argtypes = [
            *launched, count, address, count, count, address, number, address, count, address, number, address,
        ]  # fmt: skip
        self._library.run_expect.argtypes = [*launched, address, count]
        self._library.hot_state_bytes.restype = count
        self._library.run_merge.argtypes = [number, *grid[1:], address, count, address, count, address, count,
                                            address, address, address, count]  # fmt: skip
        self._library.run_join.argtypes = [*grid[1:], address, count, address, count, address, address]
        self._library.run_count.argtypes = [number, *grid[1:], address, count, address]
        self._library.run_sum_counts.argtypes = [*grid[1:], address, count, address]
        self._library.run_number.argtypes = [number, *grid[1:], address, address, count, address, address, address,
                                             address, count, address, address, address]  # fmt: skip
        self._library.run_find_places.argtypes = [*grid[1:], address, count, address, address, address]
        self._library.run_fill.argtypes = [*grid, address, count, count, count, count, real, real, key, key]

    def move(
        self, name: str, grid: int, block: int, records: int, words_per_record: int, ids: np.ndarray,
        columns: bytes, lanes: int, packed: bool = False, places: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        unknown = self._library.run_move(
            name.encode(),
            grid,
            block,
            records,
            words_per_record,
            pointer(ids),
            len(ids),
            pointer(columns),
            lanes,
            packed,
            None if places is None else pointer(places),
        )
        assert not unknown, name

    def convert(
        self, name: str, grid: int, block: int, records: int, stride: int, ids: np.ndarray, columns: bytes,
        lanes: int, packed: bool = False, places: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        unknown = self._library.run_convert(
            name.encode(),
            grid,
            block,
            records,
            stride,
            pointer(ids),
            len(ids),
            pointer(columns),
            lanes,
            packed,
            None if places is None else pointer(places),
        )
        assert not unknown, name

    def round(self, name: str, grid: int, block: int, rows: np.ndarray, ids: np.ndarray, key: int | None) -> None:
        stochastic = key is not None
        unknown = self._library.run_round(
            name.encode(), grid, block, pointer(rows), rows.shape[1], pointer(ids), len(ids), stochastic, key or 0
        )
        assert not unknown, name

    def fill(
        self, name: str, grid: int, block: int, out: np.ndarray, first_row: int, a: float, b: float, seed: int,
        column_key: int,
    ) -> None:  # fmt: skip
        num_rows, width = out.shape
        unknown = self._library.run_fill(
            name.encode(), grid, block, pointer(out), out.strides[0], first_row, num_rows, width, a, b, seed, column_key
        )
        assert not unknown, name

    def bags(self, name: str, grid: int, block: int, bags: bytes, thread: int = -1) -> None:
        assert not self._library.run_bags(name.encode(), grid, block, pointer(bags), thread), name

    def idle(self, bits: int, grid: int, block: int, idle: bytes) -> None:
        self._library.run_idle(bits, grid, block, pointer(idle))

    def adagrad(self, grid: int, block: int, rows: bytes) -> None:
        self._library.run_adagrad(grid, block, pointer(rows))

    @property
    def hot_state_bytes(self) -> int:
        return int(self._library.hot_state_bytes())

    def admission(
        self, grid: int, block: int, words: np.ndarray, state: np.ndarray, slots: int, limit: int, word: int,
        records: np.ndarray, arena: np.ndarray, lanes: int, row_of: np.ndarray,
    ) -> None:  # fmt: skip
        plan = np.empty((3, limit), np.int64)
        self._library.run_admission(
            grid, block, pointer(words), len(words), pointer(state), slots, limit, pointer(plan), word,
            pointer(records), records.shape[1], pointer(arena), lanes, pointer(row_of),
        )  # fmt: skip

    def expect(self, grid: int, block: int, words: np.ndarray, rows: np.ndarray) -> None:
        self._library.run_expect(grid, block, pointer(words), pointer(rows), len(rows))

    def lookup(self, what: str, *arguments: int | np.ndarray | None) -> None:
        """Run a kernel of lookups.cuh: its bits if it has some, grid, block, and its own arguments."""
        passed = [pointer(each) if isinstance(each, np.ndarray) else each for each in arguments]
        getattr(self._library, f"run_{what}")(*passed)

    def bandwidth_copy(self, grid: int, block: int, source: np.ndarray, target: np.ndarray) -> None:
        self._library.run_bandwidth_copy(grid, block, pointer(source), pointer(target), source.nbytes // 16)

    def bandwidth_rows(
        self, gathers: bool, grid: int, block: int, table: np.ndarray, rows: np.ndarray, values: np.ndarray
    ) -> None:
        shift = (table.shape[1] // 16).bit_length() - 1
        self._library.run_bandwidth_rows(
            gathers, grid, block, pointer(table), pointer(rows), len(rows), pointer(values), shift
        )  # fmt: skip

    def philox(self, counter: list[int], key: list[int]) -> list[int]:
        counters, keys, words = np.array(counter, np.uint32), np.array(key, np.uint32), np.empty(4, np.uint32)
        self._library.run_philox(pointer(counters), pointer(keys), pointer(words))
        return words.tolist()

    def natural_log(self, values: np.ndarray) -> np.ndarray:
        logs = np.empty_like(values)
        self._library.run_natural_log(pointer(values), pointer(logs), ctypes.c_longlong(len(values)))
        return logs

    def cosine_sine(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cosines, sines = np.empty_like(turns), np.empty_like(turns)
        self._library.run_cosine_sine(pointer(turns), pointer(cosines), pointer(sines), ctypes.c_longlong(len(turns)))
        return cosines, sines

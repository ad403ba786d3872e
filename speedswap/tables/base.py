"""Rows of a checkpoint's tensors, one tensor after the other, read where they lie in its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.files.tensor_file import TensorPlace
from speedswap.tables.files.tensor_files import MappedTensor, TensorFiles, TensorSource

_CPU = torch.device("cpu")
_PIECE_BYTES = 16 << 20  # of rows on their way to another dtype or device
_TILES = tuple(1 << power for power in range(3, 11))
_SAMPLES, _SAMPLE_BYTES = 4, 64  # of a tensor's values, for the fingerprint
_SCALE_DTYPES = (torch.float32, getattr(torch, "float8_e8m0fnu", None))


class _Scales(NamedTuple):
    """The scales of a tensor's values.

    Attributes:
        tensor: the file's.
        values: float32, or uint8 for exponents, shape (row tiles, column tiles).
        tile: rows and columns that have one scale.
    """

    tensor: MappedTensor
    values: Tensor
    tile: tuple[int, int]


class _Segment(NamedTuple):
    """One of the tensors.

    Attributes:
        tensor: the file's.
        rows: uint8, shape (n, row_bytes).
        scales: of float8.
    """

    tensor: MappedTensor
    rows: Tensor
    scales: _Scales | None

    @property
    def tensors(self) -> list[MappedTensor]:
        return [self.tensor] if self.scales is None else [self.tensor, self.scales.tensor]

    def read_ahead(self, ids: Tensor) -> None:
        kernels.read_ahead(self.rows, ids)
        if self.scales is not None:
            _, values, (tile_rows, _) = self.scales
            kernels.read_ahead(values.view(torch.uint8), ids // tile_rows)

    def read(self, ids: Tensor, out: Tensor) -> None:
        if self.scales is not None:
            kernels.decode_rows(self.rows, self.scales.values, self.scales.tile, ids, out)
            return
        place = self.rows.data_ptr(), self.rows.shape[1], len(self.rows)
        kernels.gather_records(kernels.Records(*place, self.rows.device, False, self.rows), ids, [kernels.Part(0, out)])


class TensorRows:
    """The rows of tensors in safetensors files, read in place; decoded with their scales if they are float8.

    Args:
        source: the files.
        names: names or patterns of the tensors, in the order of their rows.
        scales: names or patterns of as many tensors of scales; none for other dtypes than float8.
        block: the number of columns that have one scale, and of rows if scales are of tiles, where shapes do not say.

    Attributes:
        what: the files and tensors, for messages.
        num_embeddings: rows.
        embedding_dim: values in a row.
        dtype: the dtype on file.
        fingerprint: a hash of names, dtypes, shapes, the files' sizes and headers, and a sample of the values.

    Raises:
        ValueError: no tensor has a name, scales are missing or too many, or their shapes do not fit.
        TypeError: the tensors are not matrices of one width and floating-point dtype, or scales have another dtype.
        FileNotFoundError: a file does not exist.
        TableFormatError: a file is damaged, truncated, or not as its index says.
    """

    def __init__(
        self, source: TensorSource, names: Sequence[str], scales: Sequence[str] = (), block: int | None = None
    ) -> None:
        files = TensorFiles(source)
        found = [each for name in names for each in files.matching(name)]
        found_scales = [each for name in scales for each in files.matching(name)]
        if not found:
            raise ValueError(f"names is {names!r}; give the name of a tensor, several, or a pattern")
        places = [files.place(name) for name in found]
        self.what = f"{found[0]!r} of {files.what}" + (f" and {len(found) - 1} more tensors" if len(found) > 1 else "")
        self.dtype = _require_alike(places, found, files.what)
        is_float8 = self.dtype == torch.float8_e4m3fn
        if len(found_scales) != (len(found) if is_float8 else 0):
            wanted = "each needs one of scales: give scale=, their names" if is_float8 else "they have no scales"
            raise ValueError(
                f"scale is {found_scales[:3]}, {len(found_scales)} tensors, but {self.what} are {self.dtype}, and "
                f"{wanted}"
            )
        self.embedding_dim = places[0].shape[1]
        self._segments = [
            _segment(files, name, scale, block)
            for name, scale in zip_longest(found, found_scales)
            if files.place(name).nbytes
        ]
        self._tensors = [tensor for each in self._segments for tensor in each.tensors]
        firsts = [*accumulate((len(each.rows) for each in self._segments), initial=0)]
        self.num_embeddings, self._firsts = firsts[-1], torch.tensor(firsts, device=_CPU)
        self.fingerprint = self._fingerprint(files, [*found, *found_scales])

    def _fingerprint(self, files: TensorFiles, names: list[str]) -> str:
        readers = {name: files.reader(name) for name in names}
        described = [(name, str(place.dtype), place.shape) for name in names for place in [files.place(name)]]
        sizes = [(reader.nbytes, reader.digest) for reader in dict.fromkeys(readers.values())]
        digest = hashlib.blake2b(json.dumps([described, sizes]).encode(), digest_size=16)
        mapped = [tensor.bytes for tensor in self._tensors]
        samples = [
            each[at : at + _SAMPLE_BYTES] for each in mapped for at in range(0, len(each), -(-len(each) // _SAMPLES))
        ]
        for sample in samples:
            kernels.read_ahead(sample.unsqueeze(0), torch.zeros(1, dtype=torch.int64, device=_CPU))
        for sample in samples:
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def fill(self, into: Tensor, ids: Tensor) -> None:
        """Copy some of the rows, converted to another dtype where that is wanted.

        Args:
            into: shape (m, embedding_dim), floating-point, each row contiguous, on any device.
            ids: int64, shape (m,), ascending, in range, in host memory.

        Raises:
            TableClosedError: a file has been written since it was opened.
        """
        for tensor in self._tensors:
            tensor.check()
        for segment, some, _ in self._split(ids):
            segment.read_ahead(some)
        wanted = self.dtype
        if wanted == torch.float8_e4m3fn:
            wanted = into.dtype if into.dtype == torch.bfloat16 else torch.float32
        is_direct = into.is_cpu and into.is_contiguous() and into.dtype == wanted
        step = max(1, _PIECE_BYTES // (self.embedding_dim * wanted.itemsize))
        for some, rows in zip(torch.split(ids, step), torch.split(into, step), strict=True):
            out = rows if is_direct else torch.empty(len(some), self.embedding_dim, dtype=wanted, device=_CPU)
            for segment, local, places in self._split(some):
                segment.read(local, out[places])
            if not is_direct:
                rows.copy_(out)

    def _split(self, ids: Tensor) -> Iterator[tuple[_Segment, Tensor, slice]]:
        """Yield the segments that have some of the ids: the rows' numbers in it, and their places among the ids."""
        edges = torch.searchsorted(ids, self._firsts).tolist()
        for segment, first, (begin, end) in zip(self._segments, self._firsts.tolist(), pairwise(edges), strict=False):
            if begin < end:
                yield segment, ids[begin:end] - first, slice(begin, end)


def _require_alike(places: Sequence[TensorPlace], names: Sequence[str], what: str) -> torch.dtype:
    """Return the dtype of tensors whose rows can follow one another.

    Raises:
        TypeError: they are not matrices of one width and dtype, or the dtype is not a floating-point one.
    """
    first = places[0]
    for name, place in zip(names, places, strict=True):
        is_rows = place.dtype.is_floating_point and (place.dtype.itemsize > 1 or place.dtype == torch.float8_e4m3fn)
        if not is_rows or len(place.shape) != 2 or not place.shape[1]:
            raise TypeError(
                f"tensor {name!r} of {what} is {place.shape} of {place.dtype}; give names of matrices of "
                "floating-point numbers of 16 bits or more, or of float8_e4m3fn with scale="
            )
        if (place.dtype, place.shape[1]) != (first.dtype, first.shape[1]):
            raise TypeError(
                f"tensor {name!r} of {what} has rows of {place.shape[1]} × {place.dtype}, but those of {names[0]!r} "
                f"are {first.shape[1]} × {first.dtype}; give names of tensors of one width and dtype"
            )
    if not any(place.shape[0] for place in places):
        raise TypeError(f"tensor {names[0]!r} of {what} has no rows; give names of tensors that have some")
    return first.dtype


def _segment(files: TensorFiles, name: str, scale: str | None, block: int | None) -> _Segment:
    tensor = files.mapped(name)
    rows = tensor.bytes.view(tensor.place.shape[0], -1)
    if scale is None:
        return _Segment(tensor, rows, None)
    dtype, shape, _ = files.place(scale)
    if dtype not in _SCALE_DTYPES:
        raise TypeError(f"scale {scale!r} of {files.what} is {dtype}; scales are float32, or exponents (F8_E8M0)")
    tile = _tile(rows.shape[0], rows.shape[1], shape, block, f"scale {scale!r} of {files.what}")
    scales = files.mapped(scale)
    values = scales.bytes.view(torch.float32) if dtype == torch.float32 else scales.bytes
    return _Segment(tensor, rows, _Scales(scales, values.view((*shape, 1, 1)[:2]), tile))


def _tile(rows: int, width: int, shape: tuple[int, ...], block: int | None, what: str) -> tuple[int, int]:
    """Return how many rows and columns have one scale.

    Raises:
        ValueError: no number fits the shape of the scales, or several do.
    """
    known = [(1, width), (rows, width)]
    if block is None:
        known += [(tile, tile) for tile in _TILES]
        known += [(1, width // shape[1])] if len(shape) == 2 and shape[1] and width % shape[1] == 0 else []
    elif block > 0:
        known += [(1, block), (block, block)]
    grid = (*shape, 1, 1)[:2]
    fits = {(min(a, rows), min(b, width)) for a, b in known if (-(-rows // a), -(-width // b)) == grid}
    if len(shape) > 2 or len(fits) != 1:
        raise ValueError(
            f"{what} is of shape {shape}, and block is {block}, but the rows are {rows} × {width}; give block=, the "
            "number of columns that have one scale, or of rows and columns in a tile"
        )
    return fits.pop()

"""Forward rows from a written block to a gathered one, without going through the records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import get_num_threads
from speedswap.kernels.records import Part, Records, Stored, cpu_part, gather_records, round_rows

__all__ = ["forward", "places_among"]


def forward(
    from_rows: Tensor,
    from_blocks: Sequence[Tensor],
    to_rows: Tensor,
    to_blocks: Sequence[Tensor],
    forms: Sequence[Stored | None] | None = None,
    places: Tensor | None = None,
) -> None:
    """Copy the rows that two batches share from the blocks of one into those of the other.

    They become what records would give back had the one batch been scattered and the other gathered after it.

    Args:
        from_rows, to_rows: int64, ascending without duplicates, shapes (n,) and (m,), on the blocks' device.
        from_blocks: contiguous, shape (n, ...).
        to_blocks: contiguous, shape (m, ...), with the row shapes and dtypes of ``from_blocks``; gathered before.
        forms: how records hold each column (:class:`speedswap.kernels.Part`); not int8.
        places: what :func:`places_among` returns for the rows, if it is known.
    """
    forms = [None] * len(to_blocks) if forms is None else forms
    if not len(from_rows) or not len(to_rows):
        return
    if to_rows.device.type == "cpu":
        columns = [
            (source.data_ptr(), cpu_part(0, target.data_ptr(), target.nbytes // len(target), stored))
            for source, target, stored in zip(from_blocks, to_blocks, forms, strict=True)
        ]
        _C.forward(from_rows.data_ptr(), len(from_rows), to_rows.data_ptr(), len(to_rows), columns, get_num_threads())
        return
    # The number of shared rows is known on the GPU alone, and stays there: the others have place -1 and are skipped.
    places = places_among(from_rows, to_rows) if places is None else places
    widths: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for source, target in zip(from_blocks, to_blocks, strict=True):
        if target.numel():
            widths.setdefault(source.nbytes // len(source), []).append((source, target))
    for width, pairs in widths.items():
        # One launch for all blocks of one width: to the kernel they are columns of the first, far apart.
        first, _ = pairs[0]
        held = Records(first.data_ptr(), width, len(first), first.device, False, pairs)
        parts = [Part(source.data_ptr() - first.data_ptr(), target) for source, target in pairs]
        gather_records(held, places, parts)
    for target, stored in zip(to_blocks, forms, strict=True):
        if stored is not None and target.numel():
            round_rows(target, to_rows, stored)  # gathered rows are rounded already, and stay as they are


def places_among(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the place of each wanted row among others, -1 where it is not there; the host waits for nothing.

    Args:
        rows, wanted: int64, ascending without duplicates, shapes (n,) and (m,), n > 0, on one device.

    >>> places_among(torch.tensor([2, 5, 9]), torch.tensor([1, 5, 9]))
    tensor([-1,  1,  2])
    """
    places = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    return torch.where(rows[places] == wanted, places, -1)

"""Lookups for losses that depend on every row of the table; the next step trains all rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speedswap.errors import WeightError
from speedswap.swapping.batch_rows import GradientOfAll
from speedswap.swapping.lookup import look_up
from speedswap.swapping.row_step import RowStep


def look_up_with_all(module: Any, ids: Tensor, gradients: list[GradientOfAll]) -> tuple[Tensor, Tensor]:
    """Look rows up for training, along with gradients of every row.

    Args:
        module: an embedding, or a collection's table, whose rows are trained.
        ids: int32 or int64, shape (n,), on the device that needs the rows.
        gradients: read when these rows' gradient arrives; a function of the returned leaf appends to it before.

    Returns:
        The distinct rows, a leaf; and the row of each id, shape (n, embedding_dim).

    Raises:
        WeightError: the module's weight was replaced by a tensor.
        IdError, LostUpdateError: as for any lookup.
    """
    leaf, local = module._look_up(ids)
    step: RowStep = module._step
    if getattr(leaf, "gradient_keeper", None) is not step:
        raise WeightError(
            f"the weight of the embedding over table {module.table.name!r} was replaced, as functional_call does; call "
            "full_softmax with the embedding's own weight, or give it the table"
        )

    def receive(_: Tensor) -> None:
        for each in gradients:
            step.receive_of_all(each)

    leaf.register_post_accumulate_grad_hook(receive)
    return leaf, look_up(leaf, local)

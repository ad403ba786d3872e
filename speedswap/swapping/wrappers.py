"""Tables in a job of several processes: owned by the ranks together, or local to each with ``local_to_rank``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speedswap.errors import RanksError
from speedswap.swapping.row_step import step_of
from speedswap.swapping.weight import with_tables

# True in a process of a torch.distributed job.
is_in_job: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
_Model = TypeVar("_Model", bound=nn.Module)


def parameters_to_ignore(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of a model's embeddings that wrappers for several processes must leave alone.

    These weights stand for a batch's rows, which differ between ranks, so they can be neither sharded nor averaged.

    Args:
        model: any module; its :class:`speedswap.Embedding` and :class:`speedswap.EmbeddingBag` are found.

    Returns:
        The ``ignored_params`` of ``fully_shard`` and ``ignored_states`` of ``FullyShardedDataParallel``.

    Example:
        >>> import torch, speedswap
        >>> place = speedswap.Pageable(local_to_rank=True)
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16, storage=place), torch.nn.Linear(16, 1))
        >>> speedswap.parameters_to_ignore(model) == {model[0].weight}
        True
    """
    return {parameter for _, parameter in _weights(model)}


def ignore_in_ddp(model: _Model) -> _Model:
    """Make DistributedDataParallel ignore the weights of a model's embeddings.

    Args:
        model: the module, before it is wrapped. Parameters that are ignored already stay ignored.

    Returns:
        The model.

    Example:
        >>> import torch, speedswap
        >>> place = speedswap.Pageable(local_to_rank=True)
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16, storage=place), torch.nn.Linear(16, 1))
        >>> model = speedswap.ignore_in_ddp(model)  # then DistributedDataParallel(model)
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for name, _ in _weights(model):
        # A part of DistributedDataParallel prefixes the names of the model's own parameters with a dot.
        ignored += [each for each in (name, name if "." in name else f".{name}") if each not in ignored]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return model


def require_own_table(table: str, weight: nn.Parameter, step_weight: nn.Parameter, local_to_rank: bool) -> None:
    """Check, before a training lookup in a job, that only this process is meant to train the rows.

    Args:
        table: the table's name.
        weight: the module's weight.
        step_weight: the parameter that the table trains.
        local_to_rank: True if the table was declared local to this process.

    Raises:
        RanksError: they are not, or a wrapper would mix them with other ranks'; the message has the remedy.
    """
    if weight is not step_weight:
        raise RanksError(
            f"the weight of the embedding over table {table!r} was replaced by another, as fully_shard does; it "
            "cannot be sharded: make the embedding with storage=speedswap.Pinned(local_to_rank=True), and give "
            "fully_shard ignored_params=speedswap.parameters_to_ignore(model). (torch.func.functional_call takes a "
            "tensor, not an nn.Parameter)"
        )
    if dist.get_world_size() == 1:
        return
    if not local_to_rank:
        raise RanksError(
            f"table {table!r} belongs to this process, rank {dist.get_rank()} of {dist.get_world_size()}: the tables "
            "of the ranks would drift apart in training. Make the embedding with storage=speedswap.Ranks(), so that "
            "they own its rows together; or freeze it with embedding.weight.requires_grad_(False); or, if each rank is "
            "to train a separate table, make it with storage=speedswap.Pinned(local_to_rank=True). Then wrap it with "
            "DistributedDataParallel(speedswap.ignore_in_ddp(model)) or "
            "fully_shard(model, ignored_params=speedswap.parameters_to_ignore(model))"
        )
    wrapped = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapped is not None and any(parameter is weight for parameter in wrapped._module_parameters):
        raise RanksError(
            f"each rank looks up different rows of table {table!r}, but DistributedDataParallel would average them "
            "as if they were the same; wrap DistributedDataParallel(speedswap.ignore_in_ddp(model))"
        )


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that stand for tables, once for every name."""
    for name, parameter in with_tables(model).named_parameters(remove_duplicate=False):
        if step_of(parameter) is not None:
            yield name, parameter

"""Conversion of embeddings over tables back to torch's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from speedswap._machine import available_bytes
from speedswap._words import warn
from speedswap.errors import ConversionError, TableError, TableTooLargeError
from speedswap.swapping.embedding import Embedding
from speedswap.swapping.embedding_bag import EmbeddingBag
from speedswap.swapping.row_step import ReplacedByPlain
from speedswap.swapping.table_module import TableModule
from speedswap.tables.init import chunks_of

_log = logging.getLogger("speedswap")
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel's

Model = TypeVar("Model", bound=nn.Module)
Old = TypeVar("Old", bound=nn.Module)
Found = list[tuple[TableModule, list[str]]]
"""Modules, each with all of its dotted names."""


def to_plain(model: Model, found: Found) -> Model:
    """Replace embeddings over tables with torch's; see :func:`speedswap.convert` with ``back=True``."""
    refuse([*wrapped(model), *_reasons(model, found)])
    _require_room(found)
    optimizers = {names[0] or "the model": old._step.state.optimizer for old, names in found}
    if trained := [f"{name} ({type(each).__name__})" for name, each in optimizers.items() if each is not None]:
        warn(
            "SW504",
            f"{', '.join(trained)}: an optimizer trains the table; its state of the rows is not part of torch's "
            "embedding, and its next step raises LostUpdateError: make the optimizer again",
        )

    def plain(old: TableModule, names: Sequence[str]) -> nn.Module:
        new = _plain(old)
        _log.info("%s: torch.nn.%s in place of %r", names[0] or "the model", type(new).__name__, old.table)
        return new

    return replaced(model, found, plain)


def replaced(
    model: Model, found: list[tuple[Old, list[str]]], make: Callable[[Old, Sequence[str]], nn.Module]
) -> Model:
    """Replace each module that was found by a new one, under all of its dotted names, and let go of the old one.

    Args:
        model: the one that they are in, or the only one.
        found: is emptied, so that the memory of one is free before the next is made, unless another object holds it.
        make: returns the new module, given the old one and its names.
    """
    while found:
        old, names = found.pop(0)
        new = make(old, names)
        if old is model:
            return cast(Model, new)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent)._modules[attribute] = new
        del old
    return model


def refuse(reasons: Sequence[str]) -> None:
    """Raise ConversionError with all reasons against a conversion, if there are any."""
    if reasons:
        raise ConversionError(
            "nothing was converted:\n  " + "\n  ".join(reasons) + "\nchange that, or leave embeddings unchanged with "
            "skip=[names]"
        )


def wrapped(model: nn.Module) -> Iterator[str]:
    """Yield the reason against a conversion, if the model is wrapped in DistributedDataParallel."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        yield "the model is wrapped in DistributedDataParallel, which holds the old weights; wrap it afterwards"


def own_parts(module: nn.Module) -> Iterator[str]:
    """Yield the reasons against replacing an embedding with hooks, or with parts that its replacement lacks."""
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        yield "it has hooks; remove them, and register them with what replaces it"
    if more := [*module._buffers, *module._modules, *(name for name in module._parameters if name != "weight")]:
        yield f"it has parameters, buffers or modules of its own: {', '.join(more)}"


def _reasons(model: nn.Module, found: Found) -> Iterator[str]:
    """Yield the reasons against replacing embeddings of a model, each with its name and its remedy."""
    ignored = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters()
        if name in getattr(module, _IGNORED, ())
    }
    for module, names in found:
        others = [other for other, _ in found if other is not module]
        yield from (f"{names[0] or 'the model'}: {reason}" for reason in _reasons_against(module, others, ignored))


def _reasons_against(module: TableModule, others: Sequence[TableModule], ignored: set[int]) -> Iterator[str]:
    """Yield the reasons against replacing a module, each with its remedy."""
    if type(module) not in (Embedding, EmbeddingBag):
        yield f"is of type {type(module).__name__}, a subclass that may compute something else; use torch's in it"
        return
    if module._is_on_meta:
        yield "it is on the meta device and has no rows yet; load a state_dict into it first"
        return
    if module.ranks is not None:
        yield "ranks own its rows together; save the table with Table.save, and load it in one process"
        return
    try:
        module.table.check_open()
    except TableError as error:
        yield str(error)
        return
    step = module._step
    if module.id_map is not None:
        yield "it looks keys up, and torch's takes rows; look them up with its id_map, and embed table.read()"
    if any(other.table is module.table for other in others if not other._is_on_meta):
        yield "another embedding of the model has the same table, and each would go its way; leave one of them out"
    if step.lookaheads or step.is_stepping:
        yield "a lookahead or a step is under way; finish it first"
    elif step.awaits_step:
        yield "its weight has a gradient that awaits a step, and would be lost; call optimizer.step() or zero_grad()"
    if id(module.weight) in ignored:
        yield f"DistributedDataParallel is told to ignore its weight; delete {_IGNORED} first"
    yield from own_parts(module)


def _require_room(found: Found) -> None:
    """Raise TableTooLargeError unless the weights fit in memory; a table there is released when its rows are copied."""
    taken = most = 0
    for module, _ in found:
        if module.weight.device.type == "cpu":
            taken += module.weight.nbytes
            most = max(most, taken)
        if module.table.storage in ("pinned", "pageable"):
            taken -= module.table.nbytes
    free = available_bytes()
    if most > 0.9 * free:
        raise TableTooLargeError(
            f"the embeddings take {most:,} bytes of memory in addition, and {free:,} are free; nothing was converted: "
            "leave some of them unchanged with skip=[names]"
        )


def _plain(old: TableModule) -> nn.Embedding | nn.EmbeddingBag:
    """Return torch's equivalent of an embedding, with its values and settings."""
    table, device = old.table, old.weight.device
    try:
        rows = torch.empty(table.num_embeddings, table.embedding_dim, dtype=table.dtype, device=device)
    except RuntimeError as error:  # torch's for memory of any device
        raise TableTooLargeError(
            f"the rows of table {table.name!r} take {old.weight.nbytes:,} bytes on {device}, which could not be "
            f"allocated ({error}); the table and the following ones are unchanged"
        ) from error
    with table.lock:
        for some in chunks_of(len(rows)):
            with table.rows_between(some.start, some.stop, device) as piece:
                rows[some.start : some.stop] = piece
    kind: Any = nn.EmbeddingBag if isinstance(old, EmbeddingBag) else nn.Embedding
    new: nn.Embedding | nn.EmbeddingBag = kind(len(rows), rows.shape[1], _weight=rows, **old._settings())
    new.weight.requires_grad_(old.weight.requires_grad)
    usual = type(old)(1, 1, storage="pageable", seed=0)
    for name in vars(old).keys() - vars(usual).keys():
        if not hasattr(type(old), name):
            setattr(new, name, getattr(old, name))
    for name in vars(old.weight).keys() - vars(usual.weight).keys():
        setattr(new.weight, name, getattr(old.weight, name))
    ReplacedByPlain(old.weight, cast(nn.Parameter, new.weight), table.name)
    return new.train(old.training)

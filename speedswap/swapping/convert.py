"""Conversion of a model's large ``nn.Embedding`` and ``nn.EmbeddingBag`` to speedswap's and back, with their values."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import quote

import torch
from torch import Tensor, nn

from speedswap._machine import available_bytes
from speedswap._words import require_kind, warn
from speedswap.collectives import of_all_ranks
from speedswap.errors import ConversionError, TableError, TableTooLargeError
from speedswap.swapping.attach import ReplacedByPlain, ReplacedByTable
from speedswap.swapping.embedding import Embedding, EmbeddingBag
from speedswap.swapping.subclasses import (
    OwnParts,
    arithmetic_of,
    combined,
    over_table,
    plain_class,
    plain_with,
    reasons_against,
    settings_of,
)
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.weight import MetaWeight, TableWeight
from speedswap.tables import Storage, TensorFiles, TensorSource, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.init import chunks_of

_log = logging.getLogger("speedswap")

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # an attribute that DistributedDataParallel reads

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
            f"{', '.join(trained)}: an optimizer trains the table; its row state does not go to torch's "
            "embedding, and its next step raises LostUpdateError: create the optimizer again",
        )

    def plain(old: TableModule, names: Sequence[str]) -> nn.Module:
        new = _plain(old)
        _log.info("%s: torch.nn.%s in place of %r", names[0] or "the model", type(new).__name__, old.table)
        return new

    return replaced(model, found, plain)


def replaced(
    model: Model, found: list[tuple[Old, list[str]]], make: Callable[[Old, Sequence[str]], nn.Module]
) -> Model:
    """Replace each found module by a new one, under all of its dotted names, and release the old one.

    Args:
        model: the model that contains them, or the only found module.
        found: is emptied, so each old module's memory is free before the next new one is made, unless another object
            holds it.
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
    """Raise ConversionError if there are any reasons against a conversion; it lists all of them."""
    if reasons:
        raise ConversionError(
            "nothing was converted:\n  " + "\n  ".join(reasons) + "\nchange that, or leave embeddings unchanged with "
            "skip=[names]"
        )


def wrapped(model: nn.Module) -> Iterator[str]:
    """Yield the reason against a conversion, if the model is wrapped in DistributedDataParallel."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        yield "the model is wrapped in DistributedDataParallel, which holds the old weights; wrap it afterwards"


def own_parts(module: nn.Module, *, is_plain: bool) -> Iterator[str]:
    """Yield the reasons against replacing an embedding with hooks, or a plain one with parts that no class knows."""
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        yield "it has hooks; remove them, and register them with its replacement"
    if is_plain and (
        more := [*module._buffers, *module._modules, *(name for name in module._parameters if name != "weight")]
    ):
        yield f"it has additional parameters, buffers or modules: {', '.join(more)}"


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
        yield from (f"{names[0] or 'the model'}: {reason}" for reason in _reasons_to_keep(module, others, ignored))


def _reasons_to_keep(module: TableModule, others: Sequence[TableModule], ignored: set[int]) -> Iterator[str]:
    """Yield the reasons against replacing a module, each with its remedy."""
    if plain_class(type(module)) is None:
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
        yield "it looks keys up, but torch's takes rows; look them up with its id_map, and embed table.read()"
    if any(other.table is module.table for other in others if not other._is_on_meta):
        yield "another embedding of the model has the same table, and the copies would diverge; leave one of them out"
    if step.lookaheads or step.is_stepping:
        yield "a lookahead or a step is under way; finish it first"
    elif step.awaits_step:
        yield "its weight has a gradient that awaits a step, and would be lost; call optimizer.step() or zero_grad()"
    if id(module.weight) in ignored:
        yield f"DistributedDataParallel is told to ignore its weight; delete {_IGNORED} first"
    yield from own_parts(module, is_plain=type(module) in (Embedding, EmbeddingBag))


def _require_room(found: Found) -> None:
    """Raise TableTooLargeError unless the weights fit in memory; each table is released once its rows are copied."""
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
            f"the embeddings need {most:,} more bytes of memory, but {free:,} are free; nothing was converted: "
            "leave some of them unchanged with skip=[names]"
        )


def _plain(old: TableModule) -> nn.Embedding | nn.EmbeddingBag:
    """Return torch's equivalent of an embedding, with its values and settings."""
    table, device = old.table, old.weight.device
    try:
        rows = torch.empty(table.num_embeddings, table.embedding_dim, dtype=old.weight.dtype, device=device)
    except RuntimeError as error:  # torch's, for memory on any device
        raise TableTooLargeError(
            f"the rows of table {table.name!r} take {old.weight.nbytes:,} bytes on {device}, which could not be "
            f"allocated ({error}); the table and the following ones are unchanged"
        ) from error
    with table.lock:
        for some in chunks_of(len(rows)):
            with table.rows_between(some.start, some.stop, device) as piece:
                rows[some.start : some.stop] = piece
    kind = plain_class(type(old))
    assert kind is not None
    settings = {"padding_idx": old.padding_idx, **settings_of(old)}  # type: ignore[arg-type]
    new: nn.Embedding | nn.EmbeddingBag = plain_with(kind, rows, settings)
    new.weight.requires_grad_(old.weight.requires_grad)
    OwnParts.of(old).give(new)  # type: ignore[arg-type]
    usual = over_table(kind)(1, 1, storage="pageable", seed=0)
    for name in vars(old.weight).keys() - vars(usual.weight).keys():
        setattr(new.weight, name, getattr(old.weight, name))
    ReplacedByPlain(old.weight, cast(nn.Parameter, new.weight), table.name)
    return new.train(old.training)


_Plain: TypeAlias = nn.Embedding | nn.EmbeddingBag
_Holders: TypeAlias = defaultdict[tuple[torch.device, int], list[tuple[nn.Module, str]]]

Places: TypeAlias = Storage | str | Mapping[str, Storage | str] | Callable[[str, int], Storage | str]
"""One place for all tables; places by name or prefix of modules; or a function of a module's name and bytes."""

_PLAIN = (nn.Embedding, nn.EmbeddingBag)
_HEAD = (
    "multiplies by all rows: put torch.nn.Identity() in its place, convert again, and compute the loss from its input, "
    "speedswap.losses.sampled_softmax(hidden, targets, embedding, negatives) or, exactly, "
    "full_softmax(hidden, targets, embedding); or give it a separate copy"
)


@of_all_ranks
def convert(
    model: Model,
    min_rows: int = 100_000,
    *,
    skip: Collection[str] = (),
    storage: Places = "auto",
    path: str | os.PathLike[str] | None = None,
    init: initializers.Initializer | Callable[..., Any] | None = None,
    checkpoint: TensorSource | None = None,
    stored_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    rounding: str | None = None,
    back: bool = False,
) -> Model:
    """Replace a model's large embeddings, in place, with speedswap's embeddings of the same rows.

    Every ``nn.Embedding`` and ``nn.EmbeddingBag`` with at least ``min_rows`` rows becomes a
    :class:`speedswap.Embedding` or :class:`speedswap.EmbeddingBag` with its values, ``padding_idx``, mode, device,
    dtype, training mode and ``requires_grad``. Names and ``state_dict`` stay the same. Each replacement is logged. One
    of a subclass, such as transformers' scaled embeddings, becomes a subclass of both, with its ``forward``, parameters
    and buffers, if its ``forward`` computes the same from sample ids and looks rows up with ``super().forward(ids)``
    alone.

    **Convert before creating the optimizer**, and before the model is wrapped or compiled: an optimizer that holds an
    old weight would continue to train it, and so would any other object outside the model that holds it. The step of
    that optimizer raises :class:`~speedswap.errors.LostUpdateError`.

    A model on the meta device uses no memory for rows other than its tables. They are created here with ``init`` or
    ``checkpoint``, and otherwise when the model is loaded. With ``checkpoint``, all other parameters and persistent
    buffers on meta get their values from there too, on the CPU, in the model's dtype; with ``init`` they stay on meta.

    ``back=True`` converts back: every :class:`speedswap.Embedding` and :class:`speedswap.EmbeddingBag` becomes torch's,
    with all trained rows, on the device of its ``weight``. The optimizer's row state stays with the table, which is
    released, or flushed if it is on disk, unless another object holds it: create a new optimizer afterwards.
    Collections have no counterpart in torch and are left unchanged.

    Rows are copied piece by piece, one table at a time, and each old weight is freed before the next is copied, unless
    another object holds it: at most one additional table, the largest, is in memory.

    Args:
        model: any module; it may be an embedding itself.
        min_rows: smaller embeddings are left unchanged.
        skip: dotted names of further embeddings to leave unchanged.
        storage, path: storage of the tables, as for :class:`speedswap.Embedding`; a directory gets a subdirectory for
            each, named like its module. Ranks that will own the rows together must convert the same model, before it is
            wrapped. Or a dictionary of places by module name or prefix, where the longest match counts; its places are
            used unchanged: ``{"encoder.items": Disk("items"), "encoder": Disk("others"), "": "pinned"}``. Or a function
            of a module's name and its weight's bytes that returns its place.
        init: initial values of embeddings on meta, as for :class:`speedswap.Embedding`.
        checkpoint: values of everything on meta, by name: a safetensors file, an index, a folder with either, or a list
            of files, as for :meth:`speedswap.Embedding.from_file`. Rows are copied from there piece by piece.
        stored_dtype, state_dtype, rounding: as for :class:`speedswap.Embedding`.
        back: True to convert embeddings over tables, of any size, to torch's; only ``skip`` may be combined with it.

    Returns:
        The model; its replacement, if it is an embedding itself.

    Raises:
        ConversionError: an embedding cannot be replaced without changing the model's results: its weight is tied to
            another module, it has ``max_norm`` or ``scale_grad_by_freq``, hooks, parametrizations, or a gradient, it is
            of a subclass that uses its weight otherwise, a setting does not fit its dtype, its rows differ between the
            ranks that will own them, and so on. Or ``init`` is given for an embedding that is not on meta; or the
            checkpoint lacks a tensor, or has it with another shape or kind of dtype. The error lists all of them;
            nothing was changed.
        ValueError: ``skip`` names no embedding; the storage or one of its settings is invalid, or it has no place for
            an embedding; or ``checkpoint`` is given, but nothing is on meta. Nothing was changed.
        TypeError: ``model`` is of another type, or ``skip`` one name instead of a list.
        FileExistsError: the path of a table exists. Nothing was changed.
        TableFullError, TableTooLargeError: there is no room for a table, or for a weight that was a table; its
            embedding and the following ones are unchanged, or still on meta.

    Warns:
        SpeedswapWarning: no embedding has ``min_rows`` rows; or one is ``sparse``, but its gradients will be dense over
        the batch's rows, which ``torch.optim.SparseAdam`` does not take; use ``torch.optim.Adam``.

    Example:
        >>> import torch, speedswap
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(200_000, 8), nn.Linear(8, 1))
        >>> speedswap.convert(model, storage="pageable")[0].table
        Table('0', 200,000 × 8 float32, pageable, 0.01 GiB)
        >>> optimizer = torch.optim.Adam(model.parameters())
    """
    require_kind("model", model, nn.Module, "a torch.nn.Module")
    settings = {"stored_dtype": stored_dtype, "state_dtype": state_dtype, "rounding": rounding, "init": init}
    if back:
        given = {"storage": None if storage == "auto" else storage, "path": path, "checkpoint": checkpoint, **settings}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is {value!r}, but back is True, which makes no tables; leave one of them out")
        return to_plain(model, embeddings(model, True, skip))
    require_kind("min_rows", min_rows, Real, "a number of rows")
    found = [each for each in embeddings(model, False, skip) if each[0].num_embeddings >= min_rows]
    places = places_of(found, storage, path)
    if init is not None:
        initializers.resolve(init)  # raises unless it is an initializer
        if checkpoint is not None:
            raise ValueError("init and checkpoint are given, but both give values to what is on meta; give one of them")
    loads = None if checkpoint is None else planned(model, TensorFiles(checkpoint))
    if not found:
        _warn_of_nothing(model, min_rows)
    for each in places.values():
        each.require_free()
    require_replaceable(model, found, settings, places, loads)
    if sparse := [names[0] or "the model" for module, names in found if module.sparse]:
        warn(
            "SW502",
            f"{', '.join(sparse)}: sparse was True, but gradients are now dense, of the batch's rows; use "
            "torch.optim.Adam instead of SparseAdam: it also moves only the batch's rows",
        )

    def over_table(old: _Plain, names: Sequence[str]) -> nn.Module:
        new = replacement(old, {**settings, "name": names[0] or "embedding"}, places[names[0]])
        over = "without rows, on the meta device" if new._is_on_meta else f"over {new.table!r}"
        _log.info("%s: speedswap.%s %s", names[0] or "the model", type(new).__name__, over)
        return new

    model = replaced(model, found, over_table)
    if loads is not None:
        load(model, loads)
    return model


def places_of(
    found: Sequence[tuple[_Plain, list[str]]], storage: Places, path: str | os.PathLike[str] | None
) -> dict[str, Storage]:
    """Return the place of each embedding's table, by the embedding's first name."""
    if isinstance(storage, Storage | str | type) or (not callable(storage) and not isinstance(storage, Mapping)):
        place = as_storage(cast("Storage | str", storage), path)
        return {names[0]: _within(place, names[0]) for _, names in found}
    if path is not None:
        raise ValueError(f"path is {os.fspath(path)!r}, but storage says where each table lives; give Disk there")
    places, used = dict[str, Storage](), {""}
    for module, (name, *_) in found:
        if not isinstance(storage, Mapping):
            places[name] = as_storage(storage(name, module.weight.nbytes))
            continue
        keys = [key for key in storage if key in ("", name) or name.startswith(f"{key}.")]
        if not keys:
            raise ValueError(f'storage has no place for {name!r}; add it, or "" for the rest, or give skip=[{name!r}]')
        used.add(key := max(keys, key=len))
        place = as_storage(storage[key])
        places[name] = place if key and key == name else _within(place, name)
    if isinstance(storage, Mapping) and (unused := sorted(storage.keys() - used)):
        names = ", ".join(places) or "none"
        raise ValueError(f"storage has {unused[0]!r}, but the embeddings to be converted are {names}; leave it out")
    folders = [each.folder for each in places.values() if each.folder is not None]
    if taken := [folder for folder in folders if folders.count(folder) > 1]:
        raise ValueError(f"storage gives several tables the directory {str(taken[0])!r}; give each a directory")
    return places


def _within(place: Storage, name: str) -> Storage:
    return place.of_table(quote(name or "embedding", safe=" "))


def embeddings(model: nn.Module, over_tables: bool, skip: Collection[str]) -> list[tuple[Any, list[str]]]:
    """Return a model's embeddings over tables, or all others, each with all of its dotted names."""
    if isinstance(skip, str):
        raise TypeError(f"skip is {skip!r}; give a list of names, such as [{skip!r}]")
    names = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _PLAIN) and isinstance(module, TableModule) == over_tables
    }
    for name in skip:
        if name not in names:
            raise ValueError(
                f"skip has {name!r}, which is not an embedding; the model has {', '.join(names) or 'none'}"
            )
    skipped = {id(names[name]) for name in skip}
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, module in names.items():
        if id(module) not in skipped:
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def replacement(old: _Plain, settings: dict[str, Any], place: Storage) -> TableModule:
    """Return speedswap's equivalent of an embedding, with its values and settings."""
    try:
        new = _with_rows(old, old.weight, old.padding_idx, {**settings, "storage": place})
    except BaseException:
        place.discard()
        raise
    OwnParts.of(old).give(new)
    for name, value in vars(old.weight).items():
        setattr(new.weight, name, value)
    if not new._is_on_meta:
        ReplacedByTable(old.weight, new._step)
    return new.train(old.training)


def _with_rows(old: _Plain, rows: Tensor, padding_idx: int | None, settings: dict[str, Any]) -> TableModule:
    """Return speedswap's equivalent of an embedding, with the given rows."""
    settings = {**settings, "device": old.weight.device, **settings_of(old)}
    settings |= arithmetic_of(rows.dtype, settings["stored_dtype"])
    init = settings.pop("init")
    replaced_kind: Any = type(old)
    kind: type[TableModule] = combined(replaced_kind)
    if not rows.is_meta:
        return kind._with_rows(rows, not old.weight.requires_grad, padding_idx, **settings)
    new = kind(old.num_embeddings, old.embedding_dim, padding_idx=padding_idx, init=init, **settings)
    new.weight.requires_grad_(old.weight.requires_grad)
    return new if init is None else new.to_empty(device="cpu")


# ---------------------------------------------------------------------- refusals


def require_replaceable(
    model: nn.Module,
    found: Sequence[tuple[_Plain, list[str]]],
    settings: dict[str, Any],
    places: Mapping[str, Storage],
    loads: Loads | None,
) -> None:
    """Raise ConversionError, with all reasons, if an embedding cannot be replaced or a value cannot be loaded."""
    holders = _holders(model)
    reasons = [*wrapped(model)] if found else []
    for module, names in found:
        name = names[0] or "the model"
        reasons += [f"{name}: {reason}" for reason in _reasons_against(module, holders, settings)]
    reasons += [] if loads is None else loads.problems
    for module, names in found if not reasons else ():
        if (ranks := places[names[0]].ranks) is not None and not module.weight.is_meta:
            try:
                ranks.require_alike(module.weight, f"{names[0] or 'the model'}: its rows")
            except ValueError as error:  # raised on every rank
                reasons.append(str(error))
    refuse(reasons)


def _reasons_against(module: _Plain, holders: _Holders, settings: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons against replacing a module, each with its remedy."""
    weight = module._parameters.get("weight")
    if weight is None:
        yield "its weight is computed, as by a parametrization, and not a parameter; convert the model before that"
        return
    if type(weight) is not nn.Parameter:
        yield f"its weight is of type {type(weight).__name__}, not a plain nn.Parameter; convert the model before that"
        return
    if tuple(weight.shape) != (module.num_embeddings, module.embedding_dim):
        yield f"its weight has shape {tuple(weight.shape)}, not ({module.num_embeddings}, {module.embedding_dim})"
        return
    for other, name in holders[_address(weight)]:
        if other is not module:
            needs = _HEAD if isinstance(other, nn.Linear) else "needs all rows as a tensor; give it a separate copy"
            yield f"its weight is tied to {name!r}, which {needs}"
    if module.max_norm is not None:
        yield f"max_norm is {module.max_norm}, but a lookup does not change the table; set it to None"
    if module.scale_grad_by_freq:
        yield "scale_grad_by_freq is True; set it to False, and weight the loss by the ids' frequency"
    if weight.grad is not None:
        yield "its weight has a gradient, which would be lost; call optimizer.step() or model.zero_grad() first"
    if weight.device.type == "cpu" and weight.is_shared():  # type: ignore[no-untyped-call]
        yield "its weight is in memory shared between processes, but its table would not be; convert it before sharing"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        yield "its weight has hooks; remove them first"
    yield from own_parts(module, is_plain=type(module) in _PLAIN)
    if settings["init"] is not None and not weight.is_meta:
        yield f"init is given, but its weight is on {weight.device} and keeps its values; leave init out"
    if type(module) not in _PLAIN and (reasons := [*reasons_against(module)]):
        yield from reasons
        return
    try:
        one_row = torch.zeros_like(weight[:1], device="cpu") if weight.is_meta else weight[:1]
        trial = _with_rows(module, one_row, None, {**settings, "storage": "pageable"})
    except (ValueError, TypeError) as error:
        yield str(error)
        return
    taken = [name for name in OwnParts.of(module).attributes if hasattr(trial, name)]
    if taken:
        yield f"it has attributes that its replacement has too: {', '.join(taken)}; delete them"


def _holders(model: nn.Module) -> _Holders:
    """Return, by address, the modules that hold each parameter and buffer, with its name there."""
    holders: _Holders = defaultdict(list)
    for path, module in model.named_modules():
        if isinstance(module, TableModule):
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.layout == torch.strided:
                holders[_address(tensor)].append((module, f"{path}.{name}" if path else name))
    return holders


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _warn_of_nothing(model: nn.Module, min_rows: int) -> None:
    """Warn that nothing was converted, unless it was converted before, or skipped."""
    if any(isinstance(module, TableModule) for module in model.modules()):
        return
    rows = {name: module.num_embeddings for name, module in model.named_modules() if isinstance(module, _PLAIN)}
    if any(count >= min_rows for count in rows.values()):
        return
    largest = max(rows, key=lambda name: rows[name], default=None)
    has = "it has none" if largest is None else f"{largest or 'the model'}, the largest, has {rows[largest]:,}"
    warn(
        "SW501",
        f"no embedding of the model has {min_rows:,} rows ({has}), so nothing was converted; give min_rows=",
    )


# ---------------------------------------------------------------------- values for a model on the meta device


class Loads(NamedTuple):
    """A checkpoint's tensors for a model on the meta device.

    Attributes:
        files: the checkpoint.
        names: for each tensor to be loaded, all of its names in the model, and its name in the checkpoint.
        problems: the reasons why it cannot be loaded.
    """

    files: TensorFiles
    names: list[tuple[list[str], str]]
    problems: list[str]


def planned(model: nn.Module, files: TensorFiles) -> Loads:
    """Return the tensors of a checkpoint to load into a model's parameters and buffers on meta.

    Raises:
        ValueError: the model has nothing on meta.
        TableFormatError: a file of the checkpoint is damaged.
    """
    found: dict[int, tuple[Tensor, list[str]]] = {}
    loads = Loads(files, [], [])
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or isinstance(tensor, TableWeight) or not tensor.is_meta:
                continue
            full = f"{path}.{name}" if path else name
            if isinstance(tensor, MetaWeight) and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                loads.problems.append(f"{path}: is of a collection on meta; call its load_state_dict first")
            elif name in module._non_persistent_buffers_set:
                loads.problems.append(
                    f"{full}: is a buffer on meta that no checkpoint has; set it first, or build the model under "
                    "accelerate.init_empty_weights(), which leaves buffers where they are"
                )
            else:
                found.setdefault(id(tensor), (tensor, []))[1].append(full)
    if not found and not loads.problems:
        raise ValueError(
            "checkpoint is given, but nothing in the model is on meta, so it keeps its values; build it under "
            'torch.device("meta"), or load it with load_state_dict after the conversion'
        )
    for tensor, names in found.values():
        source = next((name for name in names if name in files), names[0])
        loads.names.append((names, source))
        if source not in files:
            loads.problems.append(files.missing(source))
            continue
        place = files.place(source)
        fits = place.dtype == tensor.dtype or (_is_float(place.dtype) and _is_float(tensor.dtype))
        if place.shape != tuple(tensor.shape) or not fits:
            loads.problems.append(
                f"{source}: the checkpoint has {place.shape} of {place.dtype}, and the model {tuple(tensor.shape)} of "
                f"{tensor.dtype}"
            )
    return loads


def _is_float(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are floating-point numbers without a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def load(model: nn.Module, loads: Loads) -> None:
    """Load a checkpoint's tensors: tables are created from their rows, other tensors are on the CPU."""
    for names, source in loads.names:
        parts = [name.rpartition(".") for name in names]
        holders = [(model.get_submodule(path), attribute) for path, _, attribute in parts]
        (module, attribute), values = holders[0], loads.files.tensor(source)
        before: Any = getattr(module, attribute)
        if isinstance(before, MetaWeight):
            setattr(module, attribute, nn.Parameter(values, requires_grad=before.requires_grad))
            continue
        new: Any = values.to(before.dtype, copy=True)
        if isinstance(before, nn.Parameter):
            new = type(before)(new, requires_grad=before.requires_grad)
            vars(new).update(vars(before))
        for module, attribute in holders:
            (module._parameters if attribute in module._parameters else module._buffers)[attribute] = new

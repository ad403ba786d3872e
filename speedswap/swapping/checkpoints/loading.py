"""Load a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap.collectives import of_all_ranks
from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.dense import (
    attach_all,
    check_model,
    check_optimizers,
    listed,
    load_dense,
    random_of,
    require_path_and_model,
    require_restorable,
    restored,
)
from speedswap.swapping.checkpoints.files import TensorsOf
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.manifest import MANIFEST, Manifest, damaged, says_malformed
from speedswap.swapping.checkpoints.plain import Decoder
from speedswap.swapping.checkpoints.random_state import check_random_state, restore_random_state
from speedswap.swapping.checkpoints.ranks import SavingRanks
from speedswap.swapping.checkpoints.table_loading import Loading
from speedswap.swapping.checkpoints.tables import modules_of, tables_of
from speedswap.swapping.optimizer_state import FoundState, OptimizerState
from speedswap.swapping.optimizers import innermost, saved_settings
from speedswap.swapping.table_module import TableModule
from speedswap.tables.files.open_directory import OpenDirectory
from speedswap.tables.shards import own_shard

__all__ = ["LoadedCheckpoint", "load_checkpoint"]


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded."""

    step: int
    extra: Any
    """As it was saved, with tensors on the CPU; of objects their ``state_dict()``."""
    path: Path
    """Its folder."""


@of_all_ranks
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    random_state: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint of :func:`save_checkpoint` into a model and its optimizers; training then goes on.

    The model is made as it was for the training, with any storage: rows that were saved from memory can go to a disk,
    and back. Its tables take the rows of the checkpoint, whatever they held. Everything is checked before anything is
    changed; files from anywhere are safe to load. A checkpoint of any number of ranks that own tables together is
    loaded by any other, each of which calls this, and by one process; and one of a process by ranks.

    Args:
        path: as for :func:`save_checkpoint`; or the folder of one checkpoint.
        model: with the same parameters, buffers and tables. None to read step and extra alone, such as the settings
            that the model is to be made with.
        optimizer: as many as were saved, of the same classes, in their order; they take the settings of the checkpoint.
            None to load the model alone: an optimizer that trains it keeps all of its state.
        step: load the newest checkpoint of this step; by default the newest.
        extra: objects with a ``load_state_dict()``, and ``torch.Generator``, that take what was saved under their keys.
        random_state: put the global random generators back too.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model. Nothing was changed.
        TableClosedError: a table of the model is closed. Nothing was changed.
        TypeError: what is in extra cannot take what was saved. Nothing was changed.
        ValueError: model is None, but there are objects that are to take what was saved. Nothing was changed.
        PeerError: another rank has failed.
        TableFullError: the disk of a table has no room for its rows.

    Example:
        >>> import tempfile, torch, speedswap
        >>> folder = tempfile.mkdtemp()
        >>> items = speedswap.Embedding(10, 2)
        >>> _ = speedswap.save_checkpoint(folder, items)
        >>> there = speedswap.Embedding(10, 2, path=folder + "/items")
        >>> _ = speedswap.load_checkpoint(folder, there)
        >>> torch.equal(there.read(), items.read())
        True
    """
    require_path_and_model(path, nn.Identity() if model is None else model)
    optimizers = listed(optimizer)
    if model is None:
        if optimizers or extra:
            given = "optimizer" if optimizers else "extra"
            raise ValueError(
                f"model is None, to read step and extra alone, so that {given} would not be loaded; give the model "
                f"too, or leave {given} out"
            )
        folder, manifest, files = _opened(path, step)
        return LoadedCheckpoint(manifest.step, _decoded(manifest, files, ("extra",))["extra"], folder)
    modules = tables_of(model)
    ranks = SavingRanks.of(modules)
    with ranks.together():
        for module in modules.values():
            module.table.check_open()
        folder, manifest, files = _opened(path, step)
        if len({*ranks.share(manifest.token)}) > 1:
            raise CheckpointError(
                f"path is {os.fspath(path)!r}, where ranks find different checkpoints; give all the same"
            )
        random = random_of(ranks.rank)
        names = ("model", "optimizers", "extra", *({random} & manifest.content.keys()))
        content = _decoded(manifest, files, names)
        check_model(content["model"], model, folder)
        if optimizers:
            with says_malformed(folder, "the optimizers"):
                check_optimizers(content["optimizers"], optimizers, folder)
        if random_state and random in content:
            with says_malformed(folder, "the state of the random generators"):
                check_random_state(content[random])
        for key, target in (extra or {}).items():
            if not isinstance(content["extra"], dict) or key not in content["extra"]:
                raise CheckpointError(f"extra has {key!r}, but the checkpoint {folder} has no extra of this name")
            require_restorable(target, content["extra"][key], key)
        modules = tables_of(model, optimizers, [each.name for each in manifest.tables])
        tables = _tables(manifest, files, model, modules)
        attach_all(optimizers, modules.values(), frozen=[module for table, module in tables if _goes_on(table, module)])
        states = [each["state"] for each in content["optimizers"]] if optimizers else []
        state_of = dict(zip(map(innermost, optimizers), states, strict=True))
        for table, module in tables:
            table.trainer = module._step.state.optimizer if module._step.state.optimizer in state_of else None
            table.check(module)
        _take_settings(tables, state_of)
        with restored(extra or {}, content["extra"], folder):
            ranks.wait()  # nothing else has changed yet, on any rank
        for table, module in tables:
            table.load(module)
        ranks.wait()  # before dense parameters are divided, which all take part in
        load_dense(model, content["model"], optimizers, states)
        for table, module in tables:
            if table.trainer is not None:
                module._step.state.resume(table.trainer, initial=table.saved.is_initial)
        if random_state and random in content:
            restore_random_state(content[random])
        ranks.wait()
    Folders.known_sound = manifest.token
    return LoadedCheckpoint(manifest.step, content["extra"], folder)


def _opened(path: str | os.PathLike[str], step: int | None) -> tuple[Path, Manifest, TensorsOf]:
    """Return the folder of a checkpoint, its description and its tensors.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = _chosen(Path(path).absolute(), step)
    try:
        directory = OpenDirectory(folder)
    except OSError as error:
        raise damaged(folder, error) from error
    return folder, Manifest.read(directory), TensorsOf(directory)


def _chosen(path: Path, step: int | None) -> Path:
    """Return the folder of a checkpoint, given itself or those of a run."""
    return path if step is None and (path / MANIFEST).exists() else Folders(path).choose(step).path


def _decoded(manifest: Manifest, files: TensorsOf, parts: Sequence[str]) -> dict[str, Any]:
    """Return parts of the checkpoint's data.

    Raises:
        CheckpointError: it is damaged.
    """
    decoder = Decoder(lambda name: files.read(manifest.tensors[name]))
    with says_malformed(files.folder, "its content"):
        content = {part: decoder.decode(manifest.content[part]) for part in parts}
        for each in content.get("optimizers", []):
            if not isinstance(each["class"], str) or not {"state", "param_groups"} <= each["state"].keys():
                raise ValueError("an optimizer's state is missing")
        if not isinstance(content.get("model", {}), dict):
            raise ValueError("the model's state is missing")
    return content


def _goes_on(table: Loading, module: TableModule) -> bool:
    """Return whether a table takes its state up again although it may not be trained at present."""
    return table.has_state and module.table.columns["weight"].stored_dtype != torch.int8


def _take_settings(tables: Iterable[tuple[Loading, TableModule]], state_of: Mapping[Optimizer, dict[str, Any]]) -> None:
    """Make room for the state that optimizers keep with the settings of a checkpoint, and not with their present ones.

    Args:
        tables: every table of the checkpoint, with its module.
        state_of: the optimizers' state in the checkpoint, which is not loaded yet.

    Raises:
        CheckpointError, OptimizerError: with these settings they keep other state than was saved. No table has changed.
    """
    found: list[tuple[OptimizerState, FoundState]] = []
    for table, module in tables:
        if table.trainer is not None and table.lacks_state_in(module):
            with saved_settings(table.trainer, state_of[table.trainer]):
                kept = module._step.state.examine(table.trainer)
            table.check_columns(module, kept.columns)
            found.append((module._step.state, kept))
    for state, kept in found:
        state.add(kept)


def _tables(
    manifest: Manifest, files: TensorsOf, model: nn.Module, modules: dict[str, TableModule]
) -> list[tuple[Loading, TableModule]]:
    """Return the tables of a checkpoint, each checked, with its module in the model.

    Args:
        modules: those of the model's tables, one each; others over the same tables may have had their place.

    Raises:
        CheckpointError: one is damaged, or they are not those of the model.
    """
    names = [saved.name for saved in manifest.tables]
    every, of_store = modules_of(model), {module.table.store: module for module in modules.values()}
    found = {name: of_store[every[name].table.store] for name in names if name in every}
    if len(names) != len(modules) or len({*found.values()}) != len(modules):
        raise CheckpointError(
            f"the model has tables at {sorted(modules)}, but the checkpoint {files.folder} at {sorted(names)}; make "
            "the model as it was for the training"
        )
    tables = []
    for saved in manifest.tables:
        missing = [name for part in saved.parts for name in part.id_maps.values() if name not in manifest.tensors]
        if any(part.id_maps.keys() != saved.id_maps.keys() for part in saved.parts):
            raise damaged(files.folder, f"an id map of table {saved.name!r} is missing")
        if missing:
            raise damaged(files.folder, f"{missing[0]!r} is missing")
        module = found[saved.name]
        loading = Loading(saved, files, manifest.token, own_shard(module.table))
        loading.check(module)
        of_ranks = {key: [manifest.tensors[part.id_maps[key]] for part in saved.parts] for key in saved.id_maps}
        loading.check_id_maps(module, {key: map(files.read, tensors) for key, tensors in of_ranks.items()})
        tables.append((loading, module))
    return tables

"""Load a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.dense import (
    attach_all,
    check_model,
    check_optimizers,
    listed,
    load_dense,
    random_of,
    require_path_and_model,
    restore,
)
from speedswap.swapping.checkpoints.files import TensorsOf
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.manifest import MANIFEST, Manifest, damaged
from speedswap.swapping.checkpoints.plain import Decoder
from speedswap.swapping.checkpoints.random_state import restore_random_state
from speedswap.swapping.checkpoints.ranks import Ranks
from speedswap.swapping.checkpoints.table_loading import Loading
from speedswap.swapping.checkpoints.tables import tables_of
from speedswap.swapping.table_module import TableModule
from speedswap.tables.files.open_directory import OpenDirectory
from speedswap.tables.ranks import own_shard

__all__ = ["LoadedCheckpoint", "load_checkpoint"]


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded."""

    step: int
    extra: Any
    """As it was saved, with tensors on the CPU; of objects their ``state_dict()``."""
    path: Path
    """Its folder."""


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
        optimizer: as many as were saved, of the same classes, in their order; None to load the model alone.
        step: load the newest checkpoint of this step; by default the newest.
        extra: objects with a ``load_state_dict()``, and ``torch.Generator``, that take what was saved under their keys.
        random_state: put the global random generators back too.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model. Nothing was changed.
        TableClosedError: a table of the model is closed. Nothing was changed.
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
        folder, manifest, files = _opened(path, step)
        return LoadedCheckpoint(manifest.step, _decoded(manifest, files, ("extra",))["extra"], folder)
    modules = tables_of(model)
    ranks = Ranks.of(modules)
    with ranks.together("the loading of a checkpoint"):
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
            check_optimizers(content["optimizers"], optimizers, folder)
        for key in extra or {}:
            if not isinstance(content["extra"], dict) or key not in content["extra"]:
                raise CheckpointError(f"extra has {key!r}, but the checkpoint {folder} has no extra of this name")
        tables = _tables(manifest, files, modules)
        attach_all(optimizers, model)
        for table, module, _ in tables:
            table.check(module, trains=bool(optimizers) and module._step.state.optimizer is not None)
        ranks.wait()  # nothing has changed yet, on any rank
        for table, module, id_maps in tables:
            table.load(module, id_maps)
        states = [each["state"] for each in content["optimizers"]] if optimizers else []
        ranks.wait()  # before dense parameters are divided, which all take part in
        load_dense(model, content["model"], optimizers, states)
        for table, module, _ in tables:
            state = module._step.state
            if optimizers and state.optimizer is not None:
                state.resume(state.optimizer, initial=table.saved.is_initial)
        for key, target in (extra or {}).items():
            restore(target, content["extra"][key], key)
        if random_state and random in content:
            restore_random_state(content[random])
        ranks.wait()
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
    try:
        content = {part: decoder.decode(manifest.content[part]) for part in parts}
        for each in content.get("optimizers", []):
            if not isinstance(each["class"], str) or not {"state", "param_groups"} <= each["state"].keys():
                raise ValueError("an optimizer's state is missing")
        if not isinstance(content.get("model", {}), dict):
            raise ValueError("the model's state is missing")
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise damaged(files.folder, f"{type(error).__name__}: {error}") from error
    return content


def _tables(
    manifest: Manifest, files: TensorsOf, modules: dict[str, TableModule]
) -> list[tuple[Loading, TableModule, dict[str, Iterable[Tensor]]]]:
    """Return the tables of a checkpoint, each with its module in the model and the bytes of its id maps, part by part.

    Raises:
        CheckpointError: one is damaged, or they are not those of the model.
    """
    names = [saved.name for saved in manifest.tables]
    if sorted(names) != sorted(modules):
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
        loading = Loading(saved, files, manifest.token, own_shard(modules[saved.name].table))
        loading.check(modules[saved.name], trains=False)
        of_ranks = {key: [manifest.tensors[part.id_maps[key]] for part in saved.parts] for key in saved.id_maps}
        for key, tensors in of_ranks.items():
            loading.check_map(modules[saved.name], key, map(files.read, tensors))
        maps: dict[str, Iterable[Tensor]] = {key: map(files.read, tensors) for key, tensors in of_ranks.items()}
        tables.append((loading, modules[saved.name], maps))
    return tables

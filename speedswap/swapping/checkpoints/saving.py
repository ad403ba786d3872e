"""Save a checkpoint."""

from __future__ import annotations

import functools
import operator
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

from torch import nn
from torch.optim import Optimizer

from speedswap.collectives import of_all_ranks
from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.checkpoints.dense import attach_all, content_of, listed, require_path_and_model
from speedswap.swapping.checkpoints.files import NewFiles
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.manifest import Manifest
from speedswap.swapping.checkpoints.parts import SavedPart, merged
from speedswap.swapping.checkpoints.plain import Encoder
from speedswap.swapping.checkpoints.ranks import SavingRanks
from speedswap.swapping.checkpoints.table_saving import Saving
from speedswap.swapping.checkpoints.tables import all_locked, is_referred_to, let_go, tables_of
from speedswap.swapping.table_module import TableModule
from speedswap.tables.files.manifest import require_shared
from speedswap.tables.shards import own_shard
from speedswap.tables.shards.parts import remove_former

__all__ = ["SavedCheckpoint", "save_checkpoint"]


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is complete and durable."""

    path: Path
    """Its folder."""
    step: int
    bytes_written: int
    """For this checkpoint, without what it shares with the one before."""


@of_all_ranks
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int | Iterable[int] | None = 1,
    tables: str = "auto",
) -> SavedCheckpoint:
    """Save a training as of one moment: it goes on from there to the same bits as if it had not been interrupted.

    Saved are the tables of the model with their optimizer state and id maps, every other parameter and buffer, the
    optimizers' state and parameter groups, the global random generators of torch, NumPy and Python, and ``extra``. Call
    it between two steps, also inside a :func:`lookahead`.

    A checkpoint is a folder in ``path``, named like ``000007-step-500``. It gets that name, by one rename, when it is
    complete and durable, and was read back: a process killed at any instant, or a full disk, leaves those before, which
    are removed afterwards. So the disk needs room for one more than ``keep``. What has not changed since the one before
    is not written again: a tensor with the same bytes, and rows of a table in memory as long as this process trains it
    and fewer than half of them have changed; folders share such files by hard links. Nothing is pickled: tensors are in
    safetensors files, the rest is JSON.

    Args:
        path: the directory for the checkpoints of one training, made if need be. In a job of several processes each
            gives its own; ranks that own tables together, who save one checkpoint and all call this, give one that
            they share.
        model: any module. Ranks that save together put what ``fully_shard`` divides together; each loads its part.
        optimizer: the optimizer, or several; those whose state is in the tables are attached.
        step: the number of steps taken, 0 or more, for the reader.
        extra: anything else: numbers, text, lists, dicts, tensors, arrays; and objects that have a ``state_dict()``,
            such as a learning rate scheduler or a GradScaler, and ``torch.Generator``.
        tables: ``"auto"`` to refer to tables on disk as of a commit that they keep, or ``"copy"``. A checkpoint refers
            to a table where that is: it is restored only while the table's files are there. They keep one commit for
            all checkpoints, in ``path`` or elsewhere, beside the one to come: with a larger ``keep``, or with
            checkpoints in two directories, some have copies.
        keep: the checkpoints that stay: the newest so many, or this one and the newest of these steps, or None for all.
            Those that are damaged count for none.

    Raises:
        CheckpointError: another process is saving there, or the disk has other bytes than were written.
        PeerError: another rank has failed.
        TableFullError: the disk has no room. The checkpoints before are whole.
        TypeError: extra, or some state, cannot be written without pickle.
        ValueError: extra contains itself, or is nested too deeply; step, keep or tables is none that there can be.
            Nothing was written.
        OptimizerError: the optimizer cannot train a table's rows.

    Example:
        >>> import tempfile, torch, speedswap
        >>> def training():
        ...     model = torch.nn.Sequential(speedswap.Embedding(1000, 8, seed=1), torch.nn.Linear(8, 1))
        ...     return model, torch.optim.Adam(model.parameters())
        >>> model, optimizer = training()
        >>> model(torch.tensor([3, 997])).sum().backward()
        >>> optimizer.step()
        >>> folder = tempfile.mkdtemp()
        >>> saved = speedswap.save_checkpoint(folder, model, optimizer, step=1, extra={"epoch": 0})
        >>> saved.path.name
        '000001-step-1'
        >>> other_model, other_optimizer = training()
        >>> loaded = speedswap.load_checkpoint(folder, other_model, other_optimizer)
        >>> loaded.step, loaded.extra
        (1, {'epoch': 0})
        >>> torch.equal(other_model[0].read(), model[0].read())
        True
    """
    require_path_and_model(path, model)
    step = operator.index(step)
    if not 0 <= step < 2**63:
        raise ValueError(f"step is {step}; give the number of steps taken, from 0 to 2**63 - 1")
    keep = _kept(keep)
    optimizers = listed(optimizer)
    if tables not in ("auto", "copy"):
        raise ValueError(f"tables is {tables!r}; give 'auto' or 'copy'")
    attach_all(optimizers, tables_of(model, optimizers).values())
    folders = Folders(Path(path).absolute())
    modules = tables_of(model)
    ranks = SavingRanks.of(modules)
    with ranks.together(), ranks.once(folders.locked, nullcontext):
        number = ranks.once(lambda: _next_number(folders, extra, keep), lambda: 0)
        number, token = ranks.share([number, secrets.token_hex(16)])[0]
        with ranks.once(lambda: folders.writing(number, step), folders.joining) as folder:
            saving = None
            try:
                ranks.wait()
                files, encoder, existing = (
                    NewFiles(require_shared(folder, folders.path)),
                    Encoder(),
                    folders.manifests(),
                )
                saving = Saving(files, number, token, existing, ranks.suffix, copies=tables == "copy")
                with all_locked(modules):
                    saved = {
                        name: saving.save(index, name, module, encoder)
                        for index, (name, module) in enumerate(modules.items())
                        if ranks.writes(module)
                    }
                    ranks.wait()  # none that has failed is missed where parts of dense parameters are put together
                    content = content_of(model, optimizers, extra, encoder, ranks.rank)
                previous = existing[-1] if existing else None
                name = f"tensors-{number}{ranks.suffix}.safetensors"
                tensors = files.write_changed(name, encoder.tensors, previous)
                saving.wait()
                with _says_unreadable(folders):
                    files.check_written(tensors.values(), saved.values())
                parts = ranks.share(SavedPart(saved, content, tensors, files.bytes_written).to_json())
                bytes_written = sum(part["bytes_written"] for part in parts)
                describe = functools.partial(_describe, folders, files, token, step, parts, modules)
                bytes_written += ranks.once(describe, lambda: 0)
            except BaseException:
                ranks.give_up()  # the others have ended when the folder goes
                if saving is not None:
                    saving.give_up()
                raise
        Folders.known_sound = token
        ranks.once(lambda: folders.remove_but(keep), lambda: None)
        ranks.wait()
        saving.published()
        existing = folders.manifests()
        for module in modules.values():
            own, owners, _ = own_shard(module.table)
            let_go(own, existing)
            if module._step.is_sharded and own.path is not None:
                is_needed = functools.partial(is_referred_to, existing)
                remove = functools.partial(remove_former, own.path.parent, owners.world_size, is_needed)
                ranks.once(remove, lambda: None)
    return SavedCheckpoint(folders.path / f"{number:06}-step-{step}", step, bytes_written)


def _next_number(folders: Folders, extra: Any, keep: int | Collection[int] | None) -> int:
    """Return the number of the next checkpoint, once ``extra`` is known to fit.

    Raises:
        CheckpointError: no number is left.
    """
    Encoder().encode(extra, "extra")  # what cannot be written is an error before tables are
    found = folders.found()
    if not found:
        return 1
    number, newest = found[-1].number + 1, found[-1].manifest()
    if newest is not None and newest.token == Folders.known_sound:
        folders.remove_but(keep)  # which a killed process has not come to
    if number >= 10**18:
        raise CheckpointError(
            f"path has {found[-1].path.name}, with the highest number that there can be; move it elsewhere"
        )
    return number


def _describe(
    folders: Folders,
    files: NewFiles,
    token: str,
    step: int,
    parts: Sequence[Any],
    modules: Mapping[str, TableModule],
) -> int:
    """Write the description of a checkpoint, given what all ranks have written; return its bytes."""
    nbytes = merged(token, step, [SavedPart.of(part) for part in parts], modules).write(files.directory)
    with _says_unreadable(folders):
        Manifest.read(files.directory)
    return nbytes


@contextmanager
def _says_unreadable(folders: Folders) -> Iterator[None]:
    """Raise CheckpointError, which names the remedy, where what was written cannot be read back."""
    try:
        yield
    except (CheckpointError, TableFormatError) as error:
        raise CheckpointError(
            f"what was written to {folders.path} cannot be read back ({error.__cause__ or error}); the checkpoints "
            "before are whole: check the disk, or give another path"
        ) from error


def _kept(keep: int | Iterable[int] | None) -> int | Collection[int] | None:
    """Return the checkpoints that stay: how many of the newest, or of which steps.

    Raises:
        ValueError: they are neither.
    """
    if keep is None or isinstance(keep, range):
        return keep
    try:
        found: int | Collection[int] = (
            frozenset(map(operator.index, keep)) if isinstance(keep, Iterable) else operator.index(keep)
        )
    except TypeError:
        found = 0
    if isinstance(found, int) and found < 1:
        shown = keep if isinstance(keep, SupportsIndex) else repr(keep)
        raise ValueError(f"keep is {shown}; give 1 or more, steps to keep, or None for all")
    return found

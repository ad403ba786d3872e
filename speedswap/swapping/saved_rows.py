"""The trained rows of a model's tables over a checkpoint, in a file beside the rest of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from speedswap.errors import TableFormatError
from speedswap.swapping.attach import attach
from speedswap.swapping.optimizers import innermost
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.whole_rows import rows_are_apart
from speedswap.tables.files.whole import write_whole
from speedswap.tables.init import OfTensors, found_in, saved_in
from speedswap.tables.rows_file import load_rows, save_rows

ROWS_FILE, BASES_FILE = "speedswap_rows.safetensors", "speedswap_rows.json"


def tables_apart(model: nn.Module) -> dict[str, TableModule]:
    """Return the embeddings of a model whose tables are over a checkpoint, by name in the model that PEFT wraps.

    Raises:
        ValueError: PEFT has copied one.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    own = getattr(model, "get_base_model", lambda: model)()
    found = {
        name.removesuffix(".base_layer"): module
        for name, module in own.named_modules()
        if isinstance(module, TableModule) and not module._is_on_meta and rows_are_apart(module.table)
    }
    if copied := [name for name in found if ".modules_to_save." in name]:
        raise ValueError(
            f"modules_to_save made {copied[0]}, a copy of a table; leave it out, and train the table itself with "
            "weight.requires_grad_(True) on its embedding after get_peft_model"
        )
    return found


def save_pretrained(model: Any, folder: str | os.PathLike[str], **settings: Any) -> None:
    """Save a model, or PEFT's adapters, as its own ``save_pretrained`` does, and the rows that training changed.

    The rows of tables over a checkpoint are left out of the model's files, and the changed ones written to
    ``speedswap_rows.safetensors``. :func:`speedswap.from_pretrained` finds them and the checkpoint again.

    Args:
        model: a model that :func:`speedswap.from_pretrained` returned, or one of PEFT's around it.
        folder: is created if it does not exist.
        settings: as for ``model.save_pretrained``.

    Raises:
        TypeError: a table has an id map.
        ValueError: PEFT has copied a table (``modules_to_save``).
        TableFullError: the disk has no room. An older file of rows stays.
    """
    tables = tables_apart(model).values()  # raises before anything is written
    before = [each.saves_rows for each in tables]
    for each in tables:
        each.saves_rows = True
    try:
        model.save_pretrained(folder, **settings)
    finally:
        for each, was in zip(tables, before, strict=True):
            each.saves_rows = was
    save_beside(model, Path(folder))


def save_beside(model: nn.Module, folder: Path, *, state: bool = False) -> None:
    """Write the changed rows of a model's tables over a checkpoint, and where that is; errors as for the tables."""
    if tables := tables_apart(model):
        save_rows(
            {name: each.table.store for name, each in tables.items()}, folder / ROWS_FILE, state=state, overwrite=True
        )
        inits = {name: each.table.columns["weight"].init for name, each in tables.items()}
        bases = {name: saved_in(folder.resolve(), init.to_json()) for name, init in inits.items()}
        with write_whole(folder / BASES_FILE) as file:
            file.write(json.dumps({"version": 1, "tables": bases}, indent=1).encode())
        _note_saved(tables)


def _note_saved(tables: Mapping[str, TableModule]) -> None:
    for each in tables.values():
        each.saved_writes = each.table.store.notes.writes


def load_beside(model: nn.Module, folder: Path, *, state: bool = False) -> None:
    """Write the rows of :func:`save_beside` to a model's tables; errors as for :meth:`speedswap.Table.load_rows`."""
    tables = tables_apart(model)
    load_rows({name: each.table.store for name, each in tables.items()}, folder / ROWS_FILE, state=state)
    _note_saved(tables)


def bases_of(folder: Path, base: Sequence[str] | None) -> dict[str, OfTensors]:
    """Return the initial values of the tables whose rows are in a folder, by name; none if it has no rows.

    Args:
        folder: where :func:`save_beside` saved.
        base: where the checkpoint's files are now; by default where they were, also from the folder.

    Raises:
        TableFormatError: the description is damaged.
    """
    path = folder / BASES_FILE
    if not path.exists():
        return {}
    try:
        described = json.loads(path.read_bytes())["tables"]
        return {name: OfTensors.from_json(found_in(folder.resolve(), base, data)) for name, data in described.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TableFormatError(f"{path} does not describe the tables of {ROWS_FILE}: {error}; copy it again") from error


def RowsCallback() -> Any:
    """Return a callback of transformers' ``Trainer``, and TRL's trainers, for tables over a checkpoint.

    Every checkpoint of the trainer gets the rows that training has changed so far, with their optimizer state, and
    ``train(resume_from_checkpoint=…)`` loads them from ``output_dir``. What the trainer saves itself leaves them out.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
            save_beside(model, _checkpoint(args, state), state=True)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
        ) -> None:
            folder, tables = _checkpoint(args, state), tables_apart(model)
            for module in tables.values():
                module.saves_rows = True
            if (folder / ROWS_FILE).exists():
                trained = [each for each in tables.values() if each.weight.requires_grad]
                for module in trained:
                    attach(optimizer, module)
                load_beside(model, folder, state=True)
                for module in trained:
                    module._step.state.resume(innermost(optimizer), initial=False)

        def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
            for module in tables_apart(model).values():
                module.saves_rows = False  # what is saved from here on is not followed by the rows

    return Callback()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"

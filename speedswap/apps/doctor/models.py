"""The embeddings of a user's model."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import nn

import speedswap
from speedswap._words import a_kind
from speedswap.apps.doctor.findings import Finding
from speedswap.apps.doctor.rates import TableSpec
from speedswap.apps.errors import SettingsError, named
from speedswap.errors import ConversionError
from speedswap.swapping.collections.group import TableInGroup

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_OURS = (speedswap.Embedding, speedswap.EmbeddingBag, TableInGroup)
_MIN_ROWS: int = inspect.signature(speedswap.convert).parameters["min_rows"].default


def built(target: str) -> nn.Module:
    """Return the model that a function makes without arguments, on the meta device unless it names another.

    Args:
        target: ``module:function`` or ``path.py:function``. What it prints goes to standard error.

    Raises:
        SettingsError: there is no such function, it raises, or it returns no module.
    """
    where, _, name = target.rpartition(":")
    file = Path(where).absolute()
    sys.path.insert(0, str(file.parent))
    try:
        with redirect_stdout(sys.stderr):
            found = runpy.run_path(str(file)) if file.suffix == ".py" else vars(importlib.import_module(where))
            if name not in found:
                raise AttributeError(f"{where} has no {name!r}")
            with torch.device("meta"):
                model = found[name] if isinstance(found[name], nn.Module) else found[name]()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} returns {a_kind(model)}")
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(sys.path[0])]
        place = "".join(f" in {Path(each.filename).name}, line {each.lineno}" for each in frames[-1:])
        says, *_ = str(error).splitlines() or [""]
        raise SettingsError(
            f"{named('model')} is {target!r}, which raises {type(error).__name__}{place}: {says}; give "
            "module:function or path.py:function, which returns a torch.nn.Module under torch.device('meta')"
        ) from error
    return model


def embeddings(model: nn.Module, like: TableSpec) -> tuple[list[TableSpec], Finding]:
    """Return a model's tables of 100,000 rows or more, and whether :func:`speedswap.convert` takes its embeddings.

    Args:
        model: the model. Where its embeddings are all on meta they are converted, to see whether that works.
        like: has the optimizer and the batch.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, _TABLES + _OURS)}
    specs = [
        TableSpec(
            rows, each.embedding_dim, like.optimizer, like.batch, name, each.weight.dtype, isinstance(each, _OURS)
        )
        for name, each in found.items()
        if (rows := each.num_embeddings) >= _MIN_ROWS
    ]
    if not all(spec.is_converted for spec in specs) and all(each.weight.is_meta for each in found.values()):
        try:
            speedswap.convert(model, storage="pageable")
        except ConversionError as error:
            says, _, remedy = str(error).rpartition("\n")
            return specs, Finding("broken", "model", " ".join(says.split()), remedy)
    says = f"{len(specs)} of {len(found)} tables have {_MIN_ROWS:,} rows or more; convert leaves smaller ones"
    return specs, Finding("ok", "model", says)

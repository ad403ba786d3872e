"""The embeddings of a user's model."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import speedswap
from speedswap.apps.doctor.findings import Finding
from speedswap.apps.doctor.rates import TableSpec
from speedswap.apps.errors import SettingsError
from speedswap.errors import ConversionError

_MIN_ROWS = 100_000  # convert's default


def built(target: str) -> nn.Module:
    """Return the model that a function makes without arguments, on the meta device unless it names another.

    Args:
        target: ``module:function`` or ``path.py:function``.

    Raises:
        SettingsError: there is no such function, or it returns no module. The function's own errors are passed on.
    """
    where, _, function = target.rpartition(":")
    file = Path(where)
    folder, module = (file.parent, file.stem) if file.suffix == ".py" else (Path(), where)
    wrong = f"model is {target!r}: give module:function or path.py:function, which returns a torch.nn.Module"
    sys.path.insert(0, str(folder.absolute()))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{wrong} ({error})") from error
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise SettingsError(f"{wrong}, not {type(model).__name__}")
    return model


def embeddings(model: nn.Module, like: TableSpec) -> tuple[list[TableSpec], Finding]:
    """Return a model's embeddings of 100,000 rows or more, and whether :func:`speedswap.convert` takes them.

    Args:
        model: the model. Where its embeddings are all on meta they are converted, to see whether that works.
        like: has the optimizer and the batch.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    specs, is_tried = list[TableSpec](), False
    for name, each in found.items():
        if each.num_embeddings >= _MIN_ROWS:
            is_ours = isinstance(each, speedswap.Embedding | speedswap.EmbeddingBag)
            dtype = str(each.weight.dtype).removeprefix("torch.")
            rows, dim = each.num_embeddings, each.embedding_dim
            specs.append(replace(like, rows=rows, dim=dim, name=name, dtype=dtype, is_converted=is_ours))
            is_tried |= not is_ours
    if is_tried and all(each.weight.is_meta for each in found.values()):
        try:
            speedswap.convert(model, storage="pageable")
        except ConversionError as error:
            says, _, remedy = str(error).rpartition("\n")
            return specs, Finding("broken", "model", says, remedy)
    return specs, Finding("ok", "model", f"{len(specs)} embeddings of {_MIN_ROWS:,} rows or more")

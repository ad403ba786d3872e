"""Values for parameters and buffers on the meta device, from a checkpoint's safetensors files."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedswap.swapping.weight import MetaWeight, TableWeight
from speedswap.tables import TensorFiles


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

"""Models of tables outside the compute device, alone or under linear layers, and their batches."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

import speedswap
from speedswap.swapping.table_module import TableModule

ABatch = TypeVar("ABatch", bound="BatchOnHost")


class BatchOnHost(Protocol):
    """A batch that can be copied to a device."""

    def to(self: ABatch, device: torch.device) -> ABatch: ...


class ModelWithTables(nn.Module):
    """The base of a model with tables, whose files, if any, are in a temporary directory."""

    _remove_folder: Callable[[], object] = staticmethod(lambda: None)  # set by a module that has one

    def stores(self) -> list[speedswap.Table]:
        """Return the tables."""
        return [module.table for module in self.modules() if isinstance(module, TableModule)]

    def close(self) -> None:
        """Close the tables, and remove those in a temporary directory."""
        for table in self.stores():
            table.close()
        for module in self.modules():
            if isinstance(module, ModelWithTables):
                module._remove_folder()

    def dense(self) -> dict[str, nn.Parameter]:
        """Return the parameters outside the tables, those of linear layers, by name."""
        layers = ((name, layer) for name, layer in self.named_modules() if isinstance(layer, nn.Linear))
        return {f"{name}.{part}": value for name, layer in layers for part, value in layer.named_parameters()}


class LayeredModel(ModelWithTables):
    """The base of a model whose parameters outside its tables are those of linear layers."""

    @abstractmethod
    def lookups(self) -> Mapping[Any, Callable[[Any], Any]]:
        """Return a batch's lookups, as for :func:`speedswap.lookahead`."""

    def prefetched(self, batches: Iterable[ABatch], device: torch.device, depth: int) -> Iterable[ABatch]:
        """Yield batches on a device, while the rows of the next ones are prefetched."""
        return speedswap.lookahead((batch.to(device) for batch in batches), self.lookups(), depth=depth)

    def initialize_layers(self, seed: int) -> None:
        """Draw the layers' weights (Xavier), and set their biases to zero."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)


def layers_of(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of these widths, each with a ReLU after it."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for ins, outs in pairs for part in (nn.Linear(ins, outs), nn.ReLU())))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU through pinned memory, so that the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

"""Subclasses of torch's embeddings over tables: one class made of the subclass and speedswap's embedding.

Its ``forward`` is the subclass's, whose ``super().forward(ids)`` looks up in the table. Whether that computes the same
is tried on sample ids before anything is converted.
"""

from __future__ import annotations

import copy
import dis
import functools
from collections.abc import Iterator
from contextlib import closing
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.errors import WeightError
from speedswap.swapping.embedding import Embedding, EmbeddingBag
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Table

_SAMPLES = 17  # rows of the trial
_MAY_BE_OVERRIDDEN = {"extra_repr", "forward"}


class OwnParts(NamedTuple):
    """The parts of an embedding that torch's class does not have.

    Attributes:
        attributes: plain ones.
        parameters, buffers, modules: by name; the parameters without the weight.
        temporary: names of buffers that are not saved.
    """

    attributes: dict[str, Any]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    modules: dict[str, nn.Module | None]
    temporary: set[str]

    @classmethod
    def of(cls, module: nn.Embedding | nn.EmbeddingBag) -> OwnParts:
        """Return those of an embedding of torch's, or over a table."""
        if isinstance(module, TableModule):
            usual: nn.Module = over_table(type(module))(1, 1, storage="pageable", seed=0)
        else:
            usual = torchs(type(module))(1, 1, device="meta")  # draws no random numbers
        return cls(
            {
                name: value
                for name, value in vars(module).items()
                if name not in vars(usual) and not (isinstance(module, TableModule) and hasattr(usual, name))
            },
            {name: value for name, value in module._parameters.items() if name != "weight"},
            {**module._buffers},
            {**module._modules},
            {*module._non_persistent_buffers_set},
        )

    def off_meta(self, device: torch.device, draw: torch.Generator) -> OwnParts:
        """Return a copy with random values, on a device, for what is on meta."""

        def drawn(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            return torch.rand(tensor.shape, generator=draw).to(device, tensor.dtype)

        holder = nn.Module()
        copy.deepcopy(self._replace(attributes={})).give(holder)
        holder._apply(drawn)  # type: ignore[no-untyped-call]
        return self._replace(parameters=holder._parameters, buffers=holder._buffers, modules=holder._modules)

    def give(self, module: nn.Module) -> None:
        """Make them another module's."""
        for name, value in self.attributes.items():
            setattr(module, name, value)
        module._parameters |= self.parameters
        for name, buffer in self.buffers.items():
            module.register_buffer(name, buffer, persistent=name not in self.temporary)
        for name, part in self.modules.items():
            module.add_module(name, part)


def torchs(kind: type[Any]) -> type[nn.Embedding | nn.EmbeddingBag]:
    """Return the class of torch's that a class is or derives from."""
    return nn.EmbeddingBag if issubclass(kind, nn.EmbeddingBag) else nn.Embedding


def over_table(kind: type[Any]) -> type[Embedding | EmbeddingBag]:
    """Return speedswap's equivalent of the class of torch's that a class is or derives from."""
    return EmbeddingBag if issubclass(kind, nn.EmbeddingBag) else Embedding


def plain_class(kind: type[Any]) -> type[Any] | None:
    """Return the class whose embeddings those of a class over tables replace; None if it was not made for any."""
    if kind in (Embedding, EmbeddingBag):
        return torchs(kind)
    found: type[Any] | None = vars(kind).get("plain_class")
    return found


@functools.cache
def combined(kind: type[Any]) -> type[Any]:
    """Return the class of embeddings over tables with a class's ``forward``."""
    ours = over_table(kind)
    if kind is torchs(kind):
        return ours
    methods = {"__init__": ours.__init__, "__reduce__": _reduced, "forward": outside_graphs(kind.forward)}
    names = {"plain_class": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, ours), methods | names)


def _reduced(module: Any) -> tuple[Any, ...]:
    """Pickle by the subclass itself, since the combined class has no name of its own to be found by."""
    make, arguments = TableModule.__reduce__(module)
    return _rebuilt, (make, plain_class(type(module)), arguments[1:], OwnParts.of(module))


def _rebuilt(make: Any, kind: type, arguments: tuple[Table, Any], parts: OwnParts) -> TableModule:
    module: TableModule = make(combined(kind), *arguments)
    parts.give(module)
    return module


def settings_of(module: nn.Embedding | nn.EmbeddingBag) -> dict[str, Any]:
    """Return the arguments that an embedding and its equivalent have in common, apart from ``padding_idx``."""
    if not isinstance(module, nn.EmbeddingBag):
        return {}
    return {"mode": module.mode, "include_last_offset": module.include_last_offset}


def arithmetic_of(dtype: torch.dtype, stored_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the dtypes of an embedding that replaces one of torch's.

    An optimizer's step is lost where it is less than bfloat16 resolves, so such rows are stepped in float32; they are
    stored and looked up as before.
    """
    if dtype != torch.bfloat16:
        return {"dtype": dtype, "stored_dtype": stored_dtype}
    return {"dtype": torch.float32, "stored_dtype": stored_dtype or dtype, "lookup_dtype": dtype}


def plain_with(kind: type[Any], rows: Tensor, settings: dict[str, Any]) -> Any:
    """Return an embedding of torch's, or of a subclass without its parts, with the given rows as its weight."""
    usual = torchs(kind)(len(rows), rows.shape[1], _weight=rows, **settings)
    plain: Any = object.__new__(kind)
    plain.__dict__ |= usual.__dict__
    return plain


def reasons_against(module: nn.Embedding | nn.EmbeddingBag) -> Iterator[str]:
    """Yield the reasons why a subclass of torch's embeddings cannot look up in a table."""
    kind, ours = type(module), over_table(type(module))
    own = kind.__mro__[: kind.__mro__.index(torchs(kind))]
    overridden = {
        name
        for each in own
        for name in vars(each)
        if any(name in vars(other) for other in (TableModule, ours)) and not name.startswith("__")
    }
    if overridden := overridden - _MAY_BE_OVERRIDDEN:
        yield f"is {a_kind(module)}, which overrides {', '.join(sorted(overridden))}; use speedswap's embedding in it"
        return
    for each in own:
        for name, function in vars(each).items():
            if name != "__init__" and isinstance(function, FunctionType) and _assigns_weight(function):
                yield f"is {a_kind(module)}, whose {name} assigns another weight"
                return
    with torch.device("cpu"):  # also while a library builds the model on meta
        reason = _difference(module)
    if reason is not None:
        yield f"is {a_kind(module)}, {reason}; use speedswap's embedding in it"


def _assigns_weight(function: FunctionType) -> bool:
    return any(each.opname == "STORE_ATTR" and each.argval == "weight" for each in dis.get_instructions(function))


@torch.no_grad()
def _difference(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Return how a subclass's lookup of sample ids in a few random rows differs from that in a table; None if not."""
    kind: Any = type(module)
    settings, dtype = settings_of(module), module.weight.dtype
    device = torch.device("cpu") if module.weight.is_meta else module.weight.device
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(_SAMPLES, module.embedding_dim, generator=draw).to(device, dtype)
    padding_idx = None if module.padding_idx is None else min(module.padding_idx, _SAMPLES - 1)
    plain = plain_with(kind, rows, {"padding_idx": padding_idx, **settings})
    settings |= arithmetic_of(dtype)
    ours = combined(kind)._with_rows(rows, True, padding_idx, storage="pageable", device=device, **settings)
    parts = OwnParts.of(module).off_meta(device, draw)
    with closing(ours.table):
        for each in (plain, ours):
            copy.deepcopy(parts._replace(attributes={})).give(each)
            parts._replace(parameters={}, buffers={}, modules={}).give(each)
            each.eval()
        few = torch.tensor([[0, _SAMPLES - 1, _SAMPLES // 2]])
        for ids in (few, torch.randint(_SAMPLES, (2, 7), generator=draw)):
            try:
                expected = plain(ids.to(device))
            except Exception as error:
                return f"whose forward cannot be tried with ids alone ({error})"
            try:
                found = ours(ids.to(device))
                is_equal = expected.dtype == found.dtype and torch.equal(expected, found)
            except WeightError:
                return "whose forward uses its weight, not super().forward(ids) alone"
            except Exception as error:
                return f"whose forward fails over a table ({error})"
            if not is_equal:
                return "whose forward computes something else over a table"
    return None

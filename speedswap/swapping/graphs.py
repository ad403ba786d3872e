"""Lookups under ``torch.compile``, ``torch.export`` and ``torch.func``: rows come from outside any graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from speedswap.errors import WeightError
from speedswap.swapping.weight import NOT_TAKEN_ALONG
from speedswap.tables import Block

P = ParamSpec("P")
R = TypeVar("R")

_Gather = Callable[[Tensor], tuple[Block, Tensor]]

_compiler, _eval_frame = torch.compiler, torch._C._dynamo.eval_frame
_PROXY = torch._C._TorchDispatchModeKey.PROXY
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a method from graphs, as ``torch.compiler.disable`` does.

    ``torch.compiler.disable`` is called only once a compiler is loaded: importing a compiler takes as long as torch
    itself.

    Raises:
        WeightError: from the method, while its module is exported.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch.export, torch.jit.trace, torch.onnx or make_fx records what runs. torch.compiler.is_exporting does not
        # tell: until torch 2.12 it is True in torch.compile's graphs as well.
        if (
            getattr(_compiler, "_is_exporting_flag", False)
            or torch._C._get_tracing_state() is not None
            or torch._C._get_dispatch_mode(_PROXY) is not None
        ):
            raise WeightError(f"{type(args[0]).__name__} was to be exported: {NOT_TAKEN_ALONG}")
        # A compiler is loaded, and sees the functions called now.
        if _compiler.is_compiling() or ("torch._dynamo" in sys.modules and _eval_frame.get_eval_frame_callback()):
            disabled: Any = getattr(function, "_outside_graphs", None)
            if disabled is None:
                disabled = _compiler.disable(function)  # type: ignore[no-untyped-call]
                function._outside_graphs = disabled  # type: ignore[attr-defined]
            return disabled(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


def leaving_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to run outside ``torch.func``: tensors from outside, or created in it, are plain."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not in_transform():
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return call


def refuse_training(table: str) -> None:
    """Raise WeightError: an optimizer cannot see the gradients of transforms."""
    raise WeightError(
        f"rows of table {table!r} were to be trained inside torch.func (grad, vjp, jvp, vmap, functionalize), whose "
        "gradients do not reach the table; look them up outside and pass what the embedding returns, freeze it with "
        "embedding.weight.requires_grad_(False), or look up under torch.no_grad()"
    )


def constant_rows(ids: Tensor, gather: _Gather) -> tuple[Tensor, Tensor]:
    """Look up ids that a transform may have wrapped; the rows are constants for it.

    Args:
        ids: int32 or int64, any shape.
        gather: returns the distinct rows of plain ids, and each id's index among them; under ``vmap`` it is called
            once, with the ids of all samples.

    Returns:
        The rows' weights, and each id's index among them.

    Raises:
        WeightError: inside ``functionalize``, which records only torch operators.
    """
    transforms = torch._C._functorch.get_interpreter_stack() or []
    if any(each.key() == torch._C._functorch.TransformType.Functionalize for each in transforms):
        raise WeightError(
            "an embedding whose rows are in a table was to be looked up inside torch.func.functionalize, which "
            "records only torch's operators; look up outside it, and pass what the embedding returns"
        )
    return _ConstantRows.apply(ids, gather)  # type: ignore[no-any-return, no-untyped-call]


class _ConstantRows(torch.autograd.Function):
    @staticmethod
    def forward(ids: Tensor, gather: _Gather) -> tuple[Tensor, Tensor]:
        block, local = gather(ids)
        return block.weight, local

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], ids: Tensor, gather: _Gather) -> Any:
        assert in_dims[0] is not None
        weights, local = constant_rows(ids.movedim(in_dims[0], 0), gather)
        return (weights, local), (None, 0)

"""Runs of a user's functions that leave no trace, watched operation by operation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap.batching.rollback import Buffers, RandomState

# torch leaves an entry of a removed hook here, and torch.compile would go on warning of it.
_HOOKS_WITH_KWARGS: dict[int, bool] = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})


class Watcher:
    """An observer of a dry run; each method is called by the run and does nothing by default."""

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Take note of an operation of torch, before it runs."""

    def made(self, func: Any, result: Any) -> None:
        """Take note of its result."""

    def saved(self, tensor: Tensor) -> None:
        """Take note of a tensor that autograd would save."""

    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take note of a module's call."""

    def left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take note of its end; if it raised, there are neither keyword arguments nor a result."""


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block whose calls leave random numbers, buffers and caches as they were, and keep no activations.

    Compiled functions run uncompiled, and warnings are ignored.

    Args:
        watcher: called for what happens inside.
        modules: those whose buffers are copied at once; the buffers of others are copied just before they run.
        keeps_graph: record the graph of gradients, without the tensors that it would keep; otherwise none.
    """

    def __init__(self, watcher: Watcher, modules: Iterable[nn.Module] = (), *, keeps_graph: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher
        self._keeps_graph = keeps_graph
        self._random, self._buffers = RandomState(), Buffers()
        for module in modules:
            self._buffers.note_modules(module.modules())
        self._generators: dict[torch.Generator, Tensor] = {}

    @property
    def has_changed(self) -> bool:
        """True if random numbers were drawn or buffers were written so far."""
        return bool(self._generators) or RandomState() != self._random or self._buffers.have_changed()

    def __enter__(self) -> DryRun:
        with ExitStack() as stack:
            stack.callback(self._restore_generators)
            for each in (self._random, self._buffers.kept(), _not_compiled(), warnings.catch_warnings()):
                stack.enter_context(each)
            stack.enter_context(torch.set_grad_enabled(self._keeps_graph))
            warnings.simplefilter("ignore")  # such as those about so few samples
            stack.callback(register_module_forward_pre_hook(self._watcher.entered).remove)
            leave = register_module_forward_hook(self._left, with_kwargs=True, always_call=True)
            stack.callback(_HOOKS_WITH_KWARGS.pop, leave.id, None)
            stack.callback(leave.remove)
            if self._keeps_graph:  # otherwise none is saved, and torch.func refuses these hooks
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._watcher.saved, _never))
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()
        torch.clear_autocast_cache()  # of weights that were cast without a graph

    def _restore_generators(self) -> None:
        """Restore the generators that were used by name."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators[value] = value.get_state()
        self._watcher.operation(func, args, kwargs)
        result = func(*args, **kwargs)
        self._watcher.made(func, result)
        return result

    def _left(self, module: nn.Module, args: Any, *others: Any) -> None:
        self._watcher.left(module, args, *(others if len(others) == 2 else ({}, None)))


def _never(packed: Any) -> Tensor:
    raise RuntimeError("a dry run keeps no activations for a backward pass")


def _not_compiled() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled, rather than compile them again for sizes that do not recur."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: Callable[..., AbstractContextManager[Any]] = torch.compiler.set_stance
    return stance("force_eager")

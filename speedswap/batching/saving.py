"""Activations between forward and backward pass: kept in host memory, or computed again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from speedswap.batching.rollback import Buffers, RandomState


@contextmanager
def activations_on_host(kept: Container[int], *, also_from_host: bool = False) -> Iterator[None]:
    """Make autograd save tensors in (pinned) host memory during a forward pass.

    A tensor that several operations save is copied once. Parameters, buffers and views of them are saved in place: they
    stay in memory anyway. So are tensors already in host memory.

    Args:
        kept: addresses of memory that is never copied, that of parameters and buffers.
        also_from_host: copy tensors in host memory too.
    """
    saved: weakref.WeakValueDictionary[tuple[Any, ...], _HostCopy] = weakref.WeakValueDictionary()

    def pack(tensor: Tensor) -> _HostCopy | _InPlace:
        if tensor.untyped_storage().data_ptr() in kept or (tensor.device.type == "cpu" and not also_from_host):
            return _InPlace(tensor)
        if tensor.layout != torch.strided or tensor.numel() == 0:
            return _InPlace(tensor)
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (reference.cdata, tensor._version, *place)
        found = saved.get(key)
        if found is None:
            found = saved[key] = _HostCopy(tensor, reference)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.unpack()):
        yield


class _InPlace:
    """A tensor saved in place; autograd leaves it to the hooks to check that it has not changed since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def unpack(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self._tensor.type()} of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}; "
                f"expected version {self._version}"
            )
        return self._tensor


class _HostCopy:
    """A tensor's copy in host memory.

    The reference keeps the address of the tensor's storage from being reused as long as this copy may be found by it.
    """

    def __init__(self, tensor: Tensor, reference: StorageWeakRef) -> None:
        pinned = tensor.is_cuda
        self._reference = reference
        self._device = tensor.device
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self._copy.copy_(tensor.detach(), non_blocking=pinned)

    def unpack(self) -> Tensor:
        return self._copy.to(self._device, non_blocking=self._copy.is_pinned())


@contextmanager
def checkpointed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make modules keep their arguments alone during a forward pass, and run again in the backward pass.

    Gradients are the same bits: the second run sees the random numbers, buffers and autocast of the first one, and
    leaves buffers and random numbers as they are. Only ``forward`` is replaced, on the object and for the time of the
    block, so that a module's own hooks run once; those of modules inside it run again.

    Args:
        modules: called with tensors, plain values, and tuples, lists and dictionaries of them. One inside another is
            run again in each second run of the outer one.
    """
    modules = list(modules)
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module in modules:
            module.__dict__["forward"] = partial(_run_twice, module, module.forward, modules)
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _run_twice(
    module: nn.Module, forward: Callable[..., Any], modules: list[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    values, nesting = tree_flatten((args, kwargs))  # checkpoint sees to tensors that are arguments by themselves

    def run(*values: Any) -> Any:
        args, kwargs = tree_unflatten(values, nesting)
        return forward(*args, **kwargs)

    return checkpoint(
        run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=partial(_both_runs, module, modules)
    )


def _both_runs(
    module: nn.Module, modules: list[nn.Module]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the blocks around the first and the second run of a module."""
    drawn: list[RandomState] = []
    written = Buffers()

    @contextmanager
    def first() -> Iterator[None]:
        random = RandomState()
        written.note_modules(module.modules())
        yield
        written.keep_changed()
        if random != RandomState():
            drawn.append(random)

    @contextmanager
    def second() -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(written.again().restore)
            written.restore()
            for random in drawn:
                stack.enter_context(RandomState())
                random.restore()
            stack.enter_context(checkpointed(modules))
            yield

    return first(), second()

"""Gradients, buffers and random numbers: saved before a batch and restored after a failure, or after a dry run."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from speedswap.collectives import RankGroup

HALF_PRECISION = (torch.float16, torch.bfloat16)


def has_memory(parameter: Tensor) -> bool:
    """Return whether a parameter has memory; one that stands for rows elsewhere refuses to show any."""
    try:
        parameter.untyped_storage()
    except RuntimeError:
        return False
    return True


def parameters_and_holders(modules: Iterable[nn.Module]) -> tuple[list[Tensor], list[nn.Module]]:
    """Return the parameters that require gradients, and the modules with buffers, of modules and all below; each once.

    One walk, since every batch needs both.
    """
    parameters: dict[int, Tensor] = {}
    holders: dict[nn.Module, None] = {}
    for module in modules:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    parameters[id(parameter)] = parameter
            if part._buffers:
                holders[part] = None
    return list(parameters.values()), list(holders)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward pass from ``loss`` would give gradients to."""
    if loss.grad_fn is None:
        if loss.requires_grad:
            yield loss
        return
    seen = {loss.grad_fn}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class GradientKeeper(Protocol):
    """An object that takes gradients out of leaves, and therefore restores them itself.

    A parameter or leaf names it in its attribute ``gradient_keeper``, as those of a :class:`speedswap.Embedding` do:
    there a gradient belongs to the rows of the lookups so far, and a leaf lives for one lookup.

    Attributes:
        group: the ranks among which it spreads the gradients; None where they stay on this one.
    """

    group: RankGroup | None

    def save_gradient(self) -> Callable[[], None]:
        """Save the present gradient; return a function that restores it, as often as it is called."""


def keeper_of(leaf: Tensor) -> GradientKeeper | None:
    """Return the object that takes a leaf's gradients; None where they stay in its ``grad``."""
    return getattr(leaf, "gradient_keeper", None)


class Float32Sums:
    """Float32 sums of half-precision parameters' gradients, except of leaves whose gradients a keeper takes.

    In half precision each addition rounds, and the error grows with the number of additions. Here the sum is rounded
    once, by :meth:`finish`; until then ``grad`` is None.

    Attributes:
        sums: those so far.
    """

    def __init__(self) -> None:
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self.sums: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def include(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, beginning with their present one."""
        for parameter in parameters:
            if parameter.dtype in HALF_PRECISION and parameter not in self._hooks and keeper_of(parameter) is None:
                hook = parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook
                given = parameter.grad
                self._add(parameter)
                if given is not None and parameter.grad is None:
                    self._given[parameter] = given

    def _add(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided:
            return
        if parameter in self.sums:
            self.sums[parameter] += grad
        else:
            self.sums[parameter] = grad.float()
        parameter.grad = None

    def finish(self) -> None:
        """Round the sums into ``grad``, into its earlier tensor where there was one."""
        self.close()
        for parameter, total in self.sums.items():
            given = self._given.get(parameter)
            parameter.grad = total.to(parameter.dtype) if given is None else given.copy_(total)

    def close(self) -> None:
        """Stop summing."""
        for hook in self._hooks.values():
            hook.remove()


class Gradients:
    """Gradients as they were before a batch.

    A gradient that was not None is copied, since the batch adds to it in place.

    Attributes:
        nbytes: bytes of the copies, without those held by keepers.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._before: dict[int, tuple[object, Callable[[], None]]] = {}
        self._versions: list[tuple[Tensor, tuple[int, int] | None]] = []

    def note(self, leaves: Iterable[Tensor]) -> None:
        """Save the gradients of leaves that have not been noted yet."""
        for leaf in leaves:
            keeper = keeper_of(leaf)
            owner = leaf if keeper is None else keeper
            if id(owner) not in self._before:
                restore = _saved(leaf) if keeper is None else keeper.save_gradient()
                grad = leaf.grad
                if keeper is None and grad is not None and grad.layout == torch.strided:
                    self.nbytes += grad.nbytes
                if keeper is None and leaf.dtype not in HALF_PRECISION:  # those are summed elsewhere
                    self._versions.append((leaf, _version_of(grad)))
                self._before[id(owner)] = owner, restore

    def have_changed(self) -> bool:
        """Return whether a leaf's gradient has changed since it was noted, as far as that is known."""
        return any(_version_of(leaf.grad) != before for leaf, before in self._versions)

    def restore(self) -> None:
        """Restore the noted gradients, in the same tensors where possible."""
        for _, restore in self._before.values():
            restore()
        self._versions = [(leaf, _version_of(leaf.grad)) for leaf, _ in self._versions]


@contextmanager
def put_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Leave leaves without a gradient inside, and add what they get there to what they had, unless the block raises."""
    given = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in given:
        leaf.grad = None
    try:
        yield
    except BaseException:
        for leaf, before in given:
            leaf.grad = before
        raise
    for leaf, before in given:
        if before is not None:
            new, leaf.grad = leaf.grad, before
            if new is not None:
                with torch.no_grad():
                    before += new


def _version_of(grad: Tensor | None) -> tuple[int, int] | None:
    """Return a value that changes with a gradient."""
    return None if grad is None else (id(grad), grad._version)


def _saved(leaf: Tensor) -> Callable[[], None]:
    """Copy a leaf's gradient; return a function that restores it."""
    before = None if leaf.grad is None else leaf.grad.detach().clone()

    def restore() -> None:
        grad = leaf.grad
        if before is None:
            leaf.grad = None
        elif grad is not None and grad.layout == before.layout == torch.strided and grad.shape == before.shape:
            with torch.no_grad():
                grad.copy_(before)
        else:
            leaf.grad = before.clone()

    return restore


class Buffers:
    """Buffers such as running statistics, by value and by place: a module may write into one, or assign another tensor.

    Args:
        buffers: those to copy.

    Attributes:
        nbytes: of the copies.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        self.nbytes = 0
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._places: dict[nn.Module, dict[str, Tensor | None]] = {}
        self.note(buffers)

    def note(self, buffers: Iterable[Tensor]) -> None:
        """Copy the buffers that have not been noted yet."""
        for buffer in buffers:
            if id(buffer) not in self._before:
                self._before[id(buffer)] = buffer, buffer.detach().clone()
                self.nbytes += buffer.nbytes

    def note_modules(self, modules: Iterable[nn.Module]) -> None:
        """Save the buffers of modules and their places, without those of modules below, unless noted already."""
        for module in modules:
            if module not in self._places:
                self._places[module] = dict(module._buffers)
                self.note(buffer for buffer in module._buffers.values() if buffer is not None)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note the buffers of each module, and of all below it, just before it runs inside; restore them at the end."""

        def note(module: nn.Module, args: Any) -> None:
            self.note_modules(module.modules())  # one that never runs itself may have a buffer that its parent writes

        try:
            with register_module_forward_pre_hook(note):
                yield
        finally:
            self.restore()

    @property
    def modules(self) -> Collection[nn.Module]:
        """The modules that were noted, in order."""
        return self._places.keys()

    def again(self) -> Buffers:
        """Copy the same buffers as they are now."""
        now = Buffers(buffer for buffer, _ in self._before.values())
        now._places = {module: dict(module._buffers) for module in self._places}
        return now

    def keep_changed(self) -> None:
        """Forget what is as it was noted; waits for devices other than the CPU."""
        self._before = {key: both for key, both in self._before.items() if not torch.equal(*both)}
        changed = {module for module, _, _ in self._reassigned()}
        self._places = {module: places for module, places in self._places.items() if module in changed}

    def _reassigned(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        return [
            (module, name, buffer)
            for module, before in self._places.items()
            for name, buffer in before.items()
            if module._buffers.get(name) is not buffer
        ]

    def have_changed(self) -> bool:
        """Return whether a buffer was written or reassigned; waits for devices other than the CPU."""
        same = not self._reassigned()
        return not (same and all(torch.equal(buffer, before) for buffer, before in self._before.values()))

    def restore(self) -> None:
        """Restore places and values.

        On the CPU, only values that differ, since BatchNorm's updates do not show in the version of a tensor. On other
        devices all of them, since a comparison would have to be waited for.
        """
        for module, name, buffer in self._reassigned():
            module._buffers[name] = buffer
        with torch.no_grad():
            for buffer, before in self._before.values():
                if buffer.device.type != "cpu" or not torch.equal(buffer, before):
                    buffer.copy_(before)


class RandomState:
    """The states of torch's generators (CPU and every CUDA device in use), of Python's and of NumPy's global one.

    As a context manager it restores them at the end of the block.
    """

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda: list[Tensor] = torch.cuda.get_rng_state_all() if in_use else []
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002, loss functions draw from the global generator

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and self._python == other._python
            and all(map(np.array_equal, self._numpy, other._numpy))
            and len(self._cuda) == len(other._cuda)
            and all(map(torch.equal, [self._cpu, *self._cuda], [other._cpu, *other._cuda]))
        )

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> RandomState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore all of these states."""
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


class Changes:
    """Gradients, buffers and random numbers as they were before a batch, so that a failed attempt leaves no trace.

    Args:
        modules: the trained ones; None to find them while they run.

    Attributes:
        gradients: those of the modules' parameters, and of leaves that are noted later.
        parameters: the modules'.
        found: the modules that have run, where they were not given.
    """

    def __init__(self, modules: Sequence[nn.Module] | None) -> None:
        self._known, self._modules = modules is not None, modules or []
        self._sums: Float32Sums | None = None
        self._random = RandomState()
        self.gradients = Gradients()
        self._buffers = Buffers()
        self._snapshots = [self._buffers]
        self._storages: set[int] = set()
        self.found: set[nn.Module] = set()
        self.parameters, self._holders = parameters_and_holders(self._modules)
        self.gradients.note(self.parameters)
        self._buffers.note_modules(self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of gradients and buffers."""
        return self.gradients.nbytes + sum(snapshot.nbytes for snapshot in self._snapshots)

    def restore(self) -> None:
        """Restore everything."""
        self.gradients.restore()
        self._buffers.restore()
        self._random.restore()

    def restore_buffers(self) -> None:
        """Restore buffers alone."""
        self._buffers.restore()

    def snapshot(self) -> Buffers:
        """Copy the buffers as they are now; those of modules found later are added when they are found."""
        snapshot = Buffers()
        snapshot.note_modules(self._holders)
        if not self._known:
            self._snapshots.append(snapshot)
        return snapshot

    def storages(self) -> set[int]:
        """Return the addresses of the memory of parameters and buffers; the set grows as modules are found."""
        if not self._storages:
            self._keep(tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        return self._storages

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        self._storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors if has_memory(tensor))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround a forward pass: where modules were not given, each is noted just before it runs."""
        if self._known:
            yield
            return
        with register_module_forward_pre_hook(self._note_found):
            yield

    def find(self, modules: Iterable[nn.Module]) -> None:
        """Note modules that will run, as they are now, where modules were not given."""
        for module in () if self._known else modules:
            self._note_found(module, ())

    def _note_found(self, module: nn.Module, args: Any) -> None:
        if module in self.found:
            return
        self.found.add(module)
        buffers = [*module.buffers(recurse=False)]
        self._holders.append(module)
        for snapshot in self._snapshots:
            snapshot.note_modules([module])
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        # A graph does not show those that a checkpoint will run again in the backward pass.
        self.gradients.note(parameter for parameter in parameters if parameter.requires_grad)
        self._keep([*buffers, *parameters])

    @contextmanager
    def summing(self, count: int) -> Iterator[None]:
        """Surround the passes of ``count`` micro-batches: half-precision gradients are summed in float32."""
        if count == 1:
            yield
            return
        sums = self._sums = Float32Sums()
        try:
            sums.include(self.parameters)
            yield
            sums.finish()
        finally:
            sums.close()
            self._sums = None

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Note the leaves that are about to get gradients from ``roots``; some may be in no module."""
        leaves = [leaf for root in roots for leaf in leaves_of(root)]
        self.gradients.note(leaves)
        if self._sums is not None:
            self._sums.include(leaves)


# ---- runs that leave no trace ---------------------------------------------------------------------------------------

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
        for generator, state in self._generators.items():  # those that were used by name
            generator.set_state(state)
        torch.clear_autocast_cache()  # of weights that were cast without a graph

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

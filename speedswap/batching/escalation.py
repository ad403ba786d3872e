"""Ways to fit a sample that does not, rung by rung: activations kept in host memory, or computed again.

A trial finds the modules that are computed again.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from speedswap._words import size_in_words
from speedswap.batching.memory import storages
from speedswap.batching.packing import SamplePacking
from speedswap.batching.ranks import TrainingRanks
from speedswap.batching.rollback import Buffers, Changes, DryRun, RandomState, Watcher, keeper_of

_log = logging.getLogger("speedswap")

OFFLOADED, CHECKPOINTED, TWICE = "offloaded", "checkpointed", "checkpointed twice"

_PLAIN = (Tensor, str, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


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


@dataclass(eq=False)
class _Call:
    """One call of a module in a forward pass.

    Attributes:
        module: None for the whole pass.
        begun: number of operations before it.
        inputs: keys of its arguments' memory.
        saved: likewise of what autograd saves in it, but not in calls inside.
        calls: those inside.
        is_plain: whether its arguments are tensors and plain values.
    """

    module: nn.Module | None = None
    begun: int = 0
    inputs: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    calls: list[_Call] = field(default_factory=list)
    is_plain: bool = False

    def inside(self) -> Iterator[_Call]:
        """Yield the calls inside, at any depth; not below a compiled module, which runs as one."""
        for call in self.calls:
            yield call
            if call.module is None or not _is_compiled(call.module):
                yield from call.inside()


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


class Activations(Watcher):
    """The tensors that each module's call saves for the backward pass, in a dry run that keeps a graph.

    Args:
        left_out: addresses of memory that is there anyway, that of parameters and buffers.
    """

    def __init__(self, left_out: Container[int]) -> None:
        self._left_out = left_out
        self._top = _Call()
        self._stack = [self._top]
        self._references: dict[int, StorageWeakRef] = {}  # keep a key from being used for other memory
        self._nbytes: dict[int, int] = {}
        self._written: dict[int, int] = {}  # the last operation that wrote a piece of memory
        self._operations = 0

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._operations += 1
        if func._schema.is_mutable:
            given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            for one in func._schema.arguments:
                if one.alias_info is not None and one.alias_info.is_write:
                    self._written.update(dict.fromkeys(self._noted(given.get(one.name)), self._operations))

    def saved(self, tensor: Tensor) -> None:
        self._stack[-1].saved |= self._noted(tensor)

    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _Call(module, self._operations)
        self._stack[-1].calls.append(call)
        self._stack.append(call)

    def left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call, values = self._stack.pop(), tree_leaves((args, kwargs))
        call.inputs, call.is_plain = self._noted(values), all(isinstance(value, _PLAIN) for value in values)

    def _noted(self, values: Any) -> set[int]:
        """Return the keys of the memory of values."""
        for key, tensor in (found := storages(values)).items():
            if key not in self._references:
                storage = tensor.untyped_storage()
                self._references[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._nbytes[key] = 0 if storage.data_ptr() in self._left_out else storage.nbytes()
        return set(found)

    def _bytes_of(self, keys: set[int]) -> int:
        return sum(self._nbytes[key] for key in keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all activations."""
        return self._held(self._top)

    def _held(self, call: _Call) -> int:
        return self._bytes_of(call.saved.union(*(inner.saved for inner in call.inside())))

    def cheapest(self, depth: int) -> tuple[int, list[nn.Module]]:
        """Choose the modules to checkpoint so that the least is held at once.

        Args:
            depth: 2 to checkpoint in the second runs of modules too.

        Returns:
            The bytes held, and the modules; no module where that saves nothing.
        """
        return self._cheapest(self._top, depth)

    def _may_repeat(self, call: _Call) -> bool:
        """Return whether a call computes the same again from its arguments.

        Not if they were written since, or its module is compiled in place, or looks up rows kept elsewhere.
        """
        module = call.module
        assert module is not None
        fixed = isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None
        unchanged = all(self._written.get(key, 0) <= call.begun for key in call.inputs)
        return call.is_plain and unchanged and not fixed and all(keeper_of(one) is None for one in module.parameters())

    def _cheapest(self, call: _Call, depth: int) -> tuple[int, list[nn.Module]]:
        best: tuple[int, list[nn.Module]] = self._held(call), []
        if not depth:
            return best
        gains = {one: self._held(one) for one in call.inside() if self._may_repeat(one)}
        gains = {one: nbytes for one, nbytes in gains.items() if nbytes > self._bytes_of(one.inputs)}
        for most in sorted(set(gains.values())):
            kept, repeated, waiting = set(call.saved), [], list(call.calls)
            while waiting:
                one = waiting.pop()
                if gains.get(one, most + 1) <= most:
                    kept |= one.inputs
                    repeated.append(one)
                else:
                    kept |= one.saved
                    waiting += one.calls
            within = [self._cheapest(one, depth - 1) for one in repeated]
            held = self._bytes_of(kept) + max((nbytes for nbytes, _ in within), default=0)
            if held < best[0]:
                modules = [one.module for one in repeated] + [module for _, inner in within for module in inner]
                best = held, list(dict.fromkeys(module for module in modules if module is not None))
        return best


@dataclass(frozen=True, eq=False)
class RungPlan:
    """The effect of one rung.

    Attributes:
        rung: its name.
        modules: those to checkpoint.
        nbytes: activations of one sample; None without a trial.
        held: those that are held at once; None where that is not known.
    """

    rung: str
    modules: Sequence[nn.Module]
    nbytes: int | None = None
    held: int | None = None

    def __str__(self) -> str:
        taken = "its activations" if self.nbytes is None else f"its activations, {size_in_words(self.nbytes)},"
        if self.rung == OFFLOADED:
            return f"{taken} are copied to host memory, and back for the backward pass"
        counts = Counter(type(one).__name__ for one in self.modules)
        names = ", ".join(f"{count} × {name}" for name, count in counts.items())
        less = "" if self.held is None else f"all but {size_in_words(self.held)} of "
        passes = "two more forward passes" if self.rung == TWICE else "one more forward pass"
        return f"{less}{taken} are computed again in the backward pass, at the cost of {passes} of {names}"


class Escalation:
    """Ways to fit one sample: none at first, and one more on each rung below.

    Args:
        wanted: False for nothing, True for modules that a trial finds, or the modules to checkpoint.
        offload: whether activations are kept in host memory in any case.
        ranks: the processes that train together.
        remembers: whether the same modules run in each batch.
    """

    def __init__(
        self, wanted: bool | Sequence[nn.Module], offload: bool, ranks: TrainingRanks, *, remembers: bool
    ) -> None:
        self._wanted = wanted
        self._always_offloads, self._offloads = offload, False
        self._ranks = ranks
        self._remembers = remembers
        self._modules: Sequence[nn.Module] = ()
        self._told: set[str] = set()

    def rungs(self, device: torch.device) -> tuple[str, ...]:
        """Return what can be done for passes on a device, in order."""
        if self._wanted is False:
            return ()
        offloads = device.type != "cpu" and not self._always_offloads and not self._ranks.in_step
        first = (OFFLOADED,) if offloads else ()
        if self._wanted is not True:
            return (*first, CHECKPOINTED)
        # A trial is a forward pass more, which other ranks might have to join.
        return (*first, CHECKPOINTED, TWICE) if self._ranks.may_differ else first

    def begin(
        self,
        rungs: Sequence[str],
        plans: dict[str, RungPlan],
        calls: Iterable[tuple[Callable[..., Any], SamplePacking]],
        changes: Changes,
    ) -> None:
        """Prepare an attempt.

        Args:
            rungs: all that it takes.
            plans: what is known of the situation, by rung; the last one's is added.
            calls: the functions that run forward, and their batches; of each, a trial takes the costliest sample.
            changes: restored after a trial.
        """
        self._offloads = OFFLOADED in rungs
        self._modules = ()
        if not rungs:
            return
        rung = rungs[-1]
        plan = plans.get(rung) or self._plan(rung, calls, changes)
        if self._remembers:
            plans[rung] = plan
        self._modules = plan.modules
        if rung not in self._told and (rung == OFFLOADED or plan.modules):
            self._told.add(rung)
            _log.warning("one sample does not fit: %s", plan)

    def _plan(self, rung: str, calls: Iterable[tuple[Callable[..., Any], SamplePacking]], changes: Changes) -> RungPlan:
        named = [] if isinstance(self._wanted, bool) or rung == OFFLOADED else self._wanted
        if not self._ranks.may_differ:
            return RungPlan(rung, named)
        activations = Activations(changes.storages())
        for function, packing in calls:
            args, kwargs = packing.batch.take(packing.parts(packing.batch.size)[0].samples)
            with changes.watched(), DryRun(activations, keeps_graph=True):
                function(*args, **kwargs)
        changes.restore()
        if named or rung == OFFLOADED:
            return RungPlan(rung, named, activations.nbytes)
        held, modules = activations.cheapest(1 if rung == CHECKPOINTED else 2)
        return RungPlan(rung, modules, activations.nbytes, held)

    @contextmanager
    def forward_pass(self, changes: Changes, *, escalates: bool) -> Iterator[None]:
        """Surround a forward pass whose backward pass follows, of a micro-batch that escalates or not."""
        with ExitStack() as stack:
            if self._always_offloads or (escalates and self._offloads):
                stack.enter_context(activations_on_host(changes.storages()))
            if escalates:
                stack.enter_context(checkpointed(self._modules))
            yield

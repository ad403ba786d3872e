"""Gradients of a whole batch from parts of it that fit."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speedswap._words import a_kind
from speedswap.batching.callbacks import Callback, Event
from speedswap.batching.functions import alive, closure, identity, kind_of, name_of
from speedswap.batching.nested import Batch, replace_tensors, tensors_of
from speedswap.batching.ranks import ranks_of
from speedswap.batching.splitting.accumulate import HALF_PRECISION
from speedswap.batching.splitting.attempts import Attempts
from speedswap.batching.splitting.aux_values import NO_AUX, joined, kept, parted
from speedswap.batching.splitting.batch_norm import batch_norms, uses_batch_statistics, whole_batch_statistics
from speedswap.batching.splitting.changes import Changes
from speedswap.batching.splitting.check import LossToCheck, find_mistake
from speedswap.batching.splitting.offload import activations_on_host
from speedswap.batching.splitting.two_passes import TwoPasses
from speedswap.errors import BatchError, CoupledLossError

__all__ = ["BatchSplitter", "coupled"]

_log = logging.getLogger("speedswap")

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

_MOST_KNOWN = 1024
_MOST_CHECKS = 8  # of one function's code, should it refer to something of another kind each time


def coupled(loss_fn: Function) -> Function:
    """Declare that a loss compares the samples of a batch with each other, as contrastive losses do.

    :meth:`BatchSplitter.backward` refuses such a loss: summed over parts of a batch it is another loss. Most that are
    not declared it finds by itself, see ``check`` there.

    >>> @coupled
    ... def contrastive(queries, documents): ...
    """
    loss_fn.couples_batch = True  # type: ignore[attr-defined]
    return loss_fn


class BatchSplitter:
    """Computes the gradients of a batch that may be larger than what fits.

    The batch is cut into micro-batches of nearly equal size, as views; their gradients add up to those of the whole
    batch, up to rounding. The exception is BatchNorm in training mode: it normalizes each micro-batch by the
    micro-batch's own statistics, as wherever gradients are accumulated, and gives other gradients. For ResNet18 and 48
    images in micro-batches of 16 the difference is about 80 % of the gradient's norm.

    With ``micro_batch_size="auto"`` the batch starts whole and is halved whenever memory runs out: gradients, buffers
    and random numbers are put back as they were and the same batch is tried again, so that it trains exactly as if the
    smaller size had been asked for. What fitted is remembered for each function, shape of a sample and class of free
    memory, and after a while without failures a larger size is tried.

    Splitting belongs to the backward pass: the optimizer's step, clipping, schedulers and averages of weights stay in
    the training loop, once a batch. Under torch's DistributedDataParallel and fully_shard the gradients, and the
    returned loss, are those of all ranks' samples together.

    Args:
        model: whose parameters get gradients: a module, or several; by default what a loss function uses is found while
            it runs. Parameters outside of it are found in the loss's graph, at about a microsecond per operation.
        micro_batch_size: samples in one forward and backward pass at the most, or ``"auto"``.
        reduction: what ``loss_fn`` does with its samples: ``"mean"`` (over what ``normalizer`` counts), ``"sum"``, or
            ``"none"`` for a loss a sample, whose sum is differentiated.
        normalizer: counts what the mean is over, called as ``loss_fn`` is, e.g. the targets that are not padding, or
            the sum of their class weights. Samples by default. Micro-batches that count 0 are left out.
        batch_norm: ``"micro_batch"`` updates running statistics with every micro-batch, as torch does; ``"window"``
            once for the whole batch. Each micro-batch is normalized by its own statistics either way, and the gradients
            are not those of the whole batch.
        check: on the first batch of each loss function that is split, compare the loss of at most eight samples
            together with their losses in two parts, and refuse a function that couples samples, or averages over
            something that ``normalizer`` does not count. That costs a few small calls of ``loss_fn``, without a graph;
            random numbers, buffers and gradients are as before. Nothing is said where nothing is certain: of functions
            that draw random numbers, use batch statistics, fail for so few samples or communicate, nor under
            fully_shard; nor can a batch without ignored targets show that they are not counted.
        scaler: scales the losses; unscaling and skipping stay ``scaler.step(optimizer)``'s.
        grow_after: batches without a failure before a larger micro-batch is tried.
        callbacks: told what happens.

    Attributes:
        callbacks: the list of callbacks, which may be changed between batches.

    >>> model = nn.Linear(3, 1)
    >>> splitter = BatchSplitter(model, micro_batch_size=10)
    >>> inputs, targets = torch.randn(64, 3), torch.randn(64, 1)
    >>> loss = splitter.backward(lambda x, y: nn.functional.mse_loss(model(x), y), inputs, targets)
    >>> bool(torch.isclose(loss, nn.functional.mse_loss(model(inputs), targets)))
    True
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | None = None,
        *,
        micro_batch_size: int | Literal["auto"] = "auto",
        reduction: Literal["mean", "sum", "none"] = "mean",
        normalizer: Callable[..., Tensor | float] | None = None,
        batch_norm: Literal["micro_batch", "window"] = "micro_batch",
        offload_activations: bool = False,
        check: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grow_after: int = 32,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        _require(reduction in ("mean", "sum", "none"), "reduction", reduction, '"mean", "sum" or "none"')
        _require(batch_norm in ("micro_batch", "window"), "batch_norm", batch_norm, '"micro_batch" or "window"')
        auto = micro_batch_size == "auto"
        _require(auto or _is_positive(micro_batch_size), "micro_batch_size", micro_batch_size, 'at least 1, or "auto"')
        _require(_is_positive(grow_after), "grow_after", grow_after, "at least 1")
        _require(normalizer is None or reduction == "mean", "normalizer", normalizer, 'None unless reduction is "mean"')
        _require(batch_norm != "window" or model is not None, "batch_norm", batch_norm, '"micro_batch" without a model')
        self.callbacks = list(callbacks)
        self._modules = None if model is None else [model] if isinstance(model, nn.Module) else list(model)
        self._reduction = reduction
        self._normalizer = normalizer
        self._batch_norm = batch_norm
        self._offload = offload_activations
        self._scaler = scaler
        self._ranks = ranks_of(self._modules or [])
        if offload_activations:
            self._refuse_in_step("offload_activations")
        self._attempts = Attempts(None if auto else int(micro_batch_size), grow_after, self._ran_out, self._resized)
        self._check = check
        self._checked: set[Hashable] = set()
        self._checked_closures: dict[Hashable, list[weakref.ref[Any]] | None] = {}
        self._checks: dict[Hashable, int] = {}
        self._gives_aux: dict[Hashable, bool] = {}
        self._warned = False

    @property
    def micro_batch_size(self) -> int | None:
        """The size in use, by the last batch; None before the first one if it is to be found."""
        return self._attempts.size

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run begins with, so that it need not run out of memory to find it again."""
        return {"micro_batch_size": self._attempts.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with the micro-batch size of another run; it grows again if it can. A fixed size stays."""
        size = state["micro_batch_size"]
        _require(size is None or _is_positive(size), "state['micro_batch_size']", size, "at least 1, or None")
        self._attempts.begin_with(size)

    # ------------------------------------------------------------------ what users call

    @overload
    def backward(self, loss_fn: Callable[..., Tensor], /, *batch: Any, **named: Any) -> Tensor: ...

    @overload
    def backward(
        self, loss_fn: Callable[..., tuple[Tensor, Any]], /, *batch: Any, **named: Any
    ) -> tuple[Tensor, Any]: ...

    def backward(self, loss_fn: Callable[..., Any], /, *batch: Any, **named: Any) -> Tensor | tuple[Tensor, Any]:
        """Add the gradients of a batch's loss to its parameters' ``grad``.

        Args:
            loss_fn: called as ``loss_fn(*micro_batch, **named)``; returns the loss of those samples, one number, or for
                reduction ``"none"`` one a sample; or that and an aux, such as logits or metrics, as a tuple. It is
                called again after an out-of-memory, and for a few samples at first, see ``check``.
            batch: tensors and nested containers of them, see :class:`~speedswap.batching.nested.Batch`.
            named: the same, by name.

        Returns:
            The loss of the whole batch, detached: 0-d, or for reduction ``"none"`` of the losses' shape. Where
            ``loss_fn`` returns ``(loss, aux)``, the loss and the aux of all micro-batches of this process, in the order
            of its samples, detached: tensors concatenated along their first dimension, 0-d tensors stacked, one for
            each micro-batch, and containers looked into; anything else is a list with one item for each micro-batch,
            see :func:`~speedswap.batching.splitting.aux_values.joined`. What is returned of a whole batch stays in
            memory, so return logits rather than activations. Micro-batches that count 0 are run without a graph for it.

        Raises:
            CoupledLossError: the loss is declared coupled, or found to be.
            BatchError: the batch or the loss cannot be split, or the loss does not average over what was declared.
            Exception: what ``loss_fn`` raises, out-of-memory included if one sample does not fit. Gradients, buffers
                and random numbers are as they were before the call.
        """
        if getattr(loss_fn, "couples_batch", False):
            raise CoupledLossError(
                f"loss_fn {name_of(loss_fn)} is declared to couple the samples of a batch, so that parts of it have "
                "another loss; give its encoder and itself to backward_coupled"
            )
        with self._ranks.together("backward"):
            whole = Batch(batch, named, may_be_empty=self._ranks.may_be_empty)
            _refuse_graphs(whole)
            size = self._begin([loss_fn], [whole])
            known = closure(loss_fn)
            changes = Changes(self._modules, self._ranks.parameters)
            changes.note([tensor for tensor in tensors_of([batch, named]) if tensor.requires_grad])

            def attempt(size: int) -> tuple[Tensor, Any]:
                sizes = self._ranks.sizes(whole.size, size)
                if self._check and len(sizes) > 1:
                    self._check_first(loss_fn, known, whole, max(sizes))
                return self._accumulate(loss_fn, whole, sizes, changes)

            (loss, aux), gives_aux = self._run(
                attempt, size, whole.size, changes, gives_aux=lambda result: result[1] is not NO_AUX
            )
            loss = self._reduced(loss, changes, average=False)
        self._gives_aux[identity(loss_fn)] = gives_aux
        self._tell("after_batch", batch_size=whole.size, loss=loss)
        if not gives_aux:
            return loss
        return loss, None if aux is NO_AUX else aux

    @overload
    def backward_coupled(
        self,
        encode: Callable[..., Any] | Sequence[Callable[..., Any]],
        loss_fn: Callable[..., Tensor],
        /,
        *batch: Any,
        **named: Any,
    ) -> Tensor: ...

    @overload
    def backward_coupled(
        self,
        encode: Callable[..., Any] | Sequence[Callable[..., Any]],
        loss_fn: Callable[..., tuple[Tensor, Any]],
        /,
        *batch: Any,
        **named: Any,
    ) -> tuple[Tensor, Any]: ...

    def backward_coupled(
        self,
        encode: Callable[..., Any] | Sequence[Callable[..., Any]],
        loss_fn: Callable[..., Any],
        /,
        *batch: Any,
        **named: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Add the exact gradients of a loss that compares all samples of a batch with each other.

        Two passes: representations of all micro-batches without a graph, the loss once over all of them, and then each
        micro-batch again, with the same random numbers, for its part of the gradient. That costs one more forward pass,
        and the memory of all representations beside that of one micro-batch.

        Args:
            encode: returns a micro-batch's representations, one tensor or a nesting of them, first dimension samples.
                Or several functions, one for each positional argument of the batch, called with it alone: the
                arguments may then have different numbers of samples.
            loss_fn: called with the representations of the whole batch, one argument for each encoder; returns one
                number, or that and an aux as a tuple. Its own parameters get their gradients too. How it reduces its
                samples is its own affair, whatever ``reduction`` the splitter has.
            batch: what is encoded.
            named: more of it, for a single encoder.

        Returns:
            The loss, detached, 0-d; or that and the aux as ``loss_fn`` returned it, its tensors detached.

        Raises:
            BatchError: the batch cannot be split, or there are not as many encoders as arguments.
            Exception: as for :meth:`backward`.
        """
        self._refuse_in_step("backward_coupled")
        with self._ranks.together("backward_coupled"):
            encoders, batches = _towers(encode, batch, named)
            for part in batches:
                _refuse_graphs(part)
            batch_size = max(part.size for part in batches)
            size = self._begin([*encoders, loss_fn], batches)
            changes = Changes(self._modules, self._ranks.parameters)

            def attempt(size: int) -> tuple[Tensor, Any]:
                passes = [
                    TwoPasses(encoder, part, self._ranks.sizes(part.size, size), changes.snapshot)
                    for encoder, part in zip(encoders, batches, strict=True)
                ]
                return self._both_passes(passes, loss_fn, changes)

            (loss, aux), _ = self._run(attempt, size, batch_size, changes)
            loss = self._reduced(loss, changes, average=True)
        self._tell("after_batch", batch_size=batch_size, loss=loss)
        return loss if aux is NO_AUX else (loss, aux)

    def forward(self, function: Callable[..., Any], /, *batch: Any, **named: Any) -> Any:
        """Run a function over a batch in micro-batches, keeping no graph but differentiable all the same.

        What is computed from the outputs can be differentiated as usual. When the backward pass arrives, each
        micro-batch is run again, with the same random numbers, and its gradients are added.

        Args:
            function: called with each micro-batch; returns tensors whose first dimension counts samples.
            batch: its arguments.
            named: the same, by name.

        Returns:
            The outputs of the whole batch, in the function's nesting.

        Raises:
            BatchError: the batch or the outputs cannot be split and joined.
            Exception: what ``function`` raises. Running out of memory in the backward pass, which needs a little more
                than the forward pass, is recovered from unless the function draws random numbers.
        """
        self._refuse_in_step("forward")
        whole = Batch(batch, named)
        _refuse_graphs(whole)
        changes = Changes(self._modules)

        def attempt(size: int) -> tuple[TwoPasses, Any]:
            passes = TwoPasses(function, whole, self._ranks.sizes(whole.size, size), changes.snapshot)
            each = self._each(passes.sizes, changes)
            with self._statistics(len(passes.sizes), changes):
                return passes, passes.first(each, with_graph=torch.is_grad_enabled())

        size = self._choose([function], [whole])
        passes, outputs = self._attempts.run(attempt, changes.restore, size, self._largest_parts(whole.size))
        self._attempts.succeeded(whole.size)
        if not torch.is_grad_enabled():
            return outputs
        anchor = torch.empty(0, requires_grad=True)
        differentiable = iter(_Replay.apply(anchor, self, passes, *tensors_of(outputs)))  # type: ignore[no-untyped-call]
        return replace_tensors(outputs, lambda _: next(differentiable))

    def map(self, function: Callable[..., Any], /, *batch: Any, **named: Any) -> Any:
        """Run a function over a batch in micro-batches, without gradients, as for evaluation.

        Args:
            function: called with each micro-batch; returns tensors whose first dimension counts samples.
            batch: its arguments.
            named: the same, by name.

        Returns:
            The outputs of the whole batch, in the function's nesting.
        """
        with torch.no_grad():
            return self.forward(function, *batch, **named)

    # ------------------------------------------------------------------ one attempt

    def _check_first(self, loss_fn: Callable[..., Any], known: Hashable, batch: Batch, size: int) -> None:
        """Refuse a loss function that has not been split before if it is not what it was declared to be."""
        references = self._checked_closures.get(known)
        if references is not None and all(reference() is not None for reference in references):
            return
        if not self._ranks.may_differ:
            return
        kind, code = (kind_of(loss_fn), self._reduction), identity(loss_fn)
        if kind not in self._checked and self._checks.get(code, 0) < _MOST_CHECKS:

            def function(args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> Tensor:
                return self._checked_loss(parted(loss_fn(*args, **kwargs))[0], loss_fn, samples)

            asked = LossToCheck(function, loss_fn, self._reduction, self._normalizer)
            mistake = find_mistake(asked, batch, size, self._modules or [])
            if mistake is not None:
                raise mistake
            self._checks[code] = self._checks.get(code, 0) + 1
        self._checked.add(kind)
        if len(self._checked_closures) > _MOST_KNOWN:
            self._checked_closures.clear()  # they are over what is made anew in each step
        self._checked_closures[known] = alive(loss_fn)

    def _accumulate(
        self, loss_fn: Callable[..., Any], batch: Batch, sizes: list[int], changes: Changes
    ) -> tuple[Tensor, Any]:
        """Forward and backward, micro-batch by micro-batch."""
        stops = itertools.accumulate(sizes)
        parts = [batch.part(stop - max(size, 1), stop) for size, stop in zip(sizes, stops, strict=True)]
        weights = self._weights(parts, sizes)
        place: dict[str, Any] = {"batch_size": batch.size, "micro_batch_sizes": tuple(sizes)}
        self._tell("before_batch", **place)
        losses: list[Tensor] = []
        auxes = [NO_AUX] * len(parts)
        with self._statistics(len(parts), changes), changes.summing(len(parts)):
            for index, ((args, kwargs), size, weight) in enumerate(zip(parts, sizes, weights, strict=True)):
                with self._ranks.micro_batch(index, len(parts)):
                    if weight:
                        here = place | {"index": index}
                        loss, auxes[index] = self._one(loss_fn, args, kwargs, size, weight, here, changes)
                        losses.append(loss)
                    else:
                        self._ranks.idle(functools.partial(self._aside, loss_fn, args, kwargs, auxes, index))
            self._run_left_out(loss_fn, parts, sizes, weights, auxes, changes)
        real = [index for index, size in enumerate(sizes) if size]
        aux = NO_AUX
        if any(auxes[index] is not NO_AUX for index in real):
            aux = joined([auxes[index] for index in real], [sizes[index] for index in real])
        if self._reduction == "none":
            return torch.cat(losses) if losses else torch.zeros(0, device=batch.device), aux
        return functools.reduce(torch.add, losses) if losses else torch.zeros((), device=batch.device), aux

    def _aside(
        self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], auxes: list[Any], index: int
    ) -> None:
        """Call a loss function for its aux alone."""
        aux = parted(loss_fn(*args, **kwargs))[1]
        auxes[index] = aux if aux is NO_AUX else kept(aux)

    def _run_left_out(
        self,
        loss_fn: Callable[..., Any],
        parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        sizes: Sequence[int],
        weights: Sequence[float],
        auxes: list[Any],
        changes: Changes,
    ) -> None:
        """Call the loss function for the micro-batches that count nothing too, where it returns an aux."""
        if all(weights):
            return
        if any(weights):
            wanted = any(aux is not NO_AUX for aux in auxes)
        else:
            wanted = self._gives_aux.get(identity(loss_fn), True)
        if not wanted or self._ranks.in_step:  # where all ranks keep company, it has been called already
            return
        for index, ((args, kwargs), size, weight) in enumerate(zip(parts, sizes, weights, strict=True)):
            if size and not weight:
                with self._ranks.micro_batch(index, len(parts)), torch.no_grad(), changes.watched():
                    self._aside(loss_fn, args, kwargs, auxes, index)
                if auxes[index] is NO_AUX:
                    return

    def _one(
        self,
        loss_fn: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: int,
        weight: float,
        place: dict[str, Any],
        changes: Changes,
    ) -> tuple[Tensor, Any]:
        """One micro-batch. Returns what it adds to the loss, detached, and its aux."""
        self._tell("before_micro_batch", **place)
        with changes.watched(), self._offloaded(changes):
            loss, aux = parted(loss_fn(*args, **kwargs))
            loss = self._checked_loss(loss, loss_fn, size)
        if aux is not NO_AUX:
            aux = kept(aux)
        self._tell("before_backward", **place, loss=loss.detach())
        part = loss if weight == 1 else loss.float() * weight if loss.dtype in HALF_PRECISION else loss * weight
        changes.before_backward([part])
        scaled = part if self._scaler is None else self._scaler.scale(part)
        torch.autograd.backward([scaled], [torch.ones_like(scaled)])
        self._tell("after_micro_batch", **place, loss=loss.detach())
        return part.detach(), aux

    def _both_passes(
        self, passes: list[TwoPasses], loss_fn: Callable[..., Any], changes: Changes
    ) -> tuple[Tensor, Any]:
        sizes = [size for one in passes for size in one.sizes]
        batch_size = max(sum(one.sizes) for one in passes)
        self._tell("before_batch", batch_size=batch_size, micro_batch_sizes=tuple(sizes))
        each = self._each(sizes, changes)
        with self._statistics(len(sizes), changes):
            outputs = [replace_tensors(one.first(each), _as_leaf) for one in passes]
        with changes.watched():
            loss, aux = parted(loss_fn(*outputs))
            loss = _one_number(loss, loss_fn)
        with changes.summing(len(sizes)):
            changes.before_backward([loss])
            torch.autograd.backward([loss if self._scaler is None else self._scaler.scale(loss)])
            second = self._each(sizes, changes, offloaded=True)
            for one, output in zip(passes, outputs, strict=True):
                one.second([tensor.grad for tensor in tensors_of(output)], one.sizes, second, changes.before_backward)
        return loss.detach(), aux if aux is NO_AUX else kept(aux)

    def _each(
        self, sizes: list[int], changes: Changes, *, offloaded: bool = False
    ) -> Callable[[int, Callable[[], Any]], Any]:
        """Runs one micro-batch of two passes, and tells about it."""
        count, batch_size, index = len(sizes), sum(sizes), -1

        def each(size: int, run: Callable[[], Any]) -> Any:
            nonlocal index
            index += 1
            place = {"batch_size": batch_size, "micro_batch_sizes": tuple(sizes), "index": index}
            self._tell("before_micro_batch", **place)
            with (
                self._ranks.micro_batch(index, count),
                changes.watched(),
                self._offloaded(changes) if offloaded else nullcontext(),
            ):
                result = run()
            self._tell("after_micro_batch", **place)
            return result

        return each

    def _replay(self, passes: TwoPasses, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass of :meth:`forward`."""
        batch_size, largest = sum(passes.sizes), max(passes.sizes)
        with self._ranks.together("forward"):
            self._ranks.begin(largest, batch_size)
            changes = Changes(self._modules, self._ranks.parameters)

            def attempt(size: int) -> Tensor:
                sizes = passes.sizes if size == largest else self._ranks.sizes(batch_size, size)
                with changes.summing(len(sizes)):
                    each = self._each(sizes, changes, offloaded=True)
                    passes.second(gradients, sizes, each, changes.before_backward)
                return torch.zeros(())

            nothing, _ = self._run(attempt, largest, batch_size, changes, may_shrink=not passes.is_random, count=False)
            self._reduced(nothing, changes, average=True)

    def _choose(self, functions: Sequence[Callable[..., Any]], batches: Sequence[Batch]) -> int:
        """The size to begin with, from what is known of the functions and batches."""
        key = (*map(identity, functions), *(batch.signature() for batch in batches))
        parameters = itertools.chain.from_iterable(module.parameters() for module in self._modules or [])
        device = next((parameter.device for parameter in parameters), batches[0].device)
        return self._attempts.choose(key, max(batch.size for batch in batches), device)

    def _begin(self, functions: Sequence[Callable[..., Any]], batches: Sequence[Batch]) -> int:
        """The size to begin with, from what all ranks know."""
        size = self._choose(functions, batches)
        return self._attempts.agree(size, self._ranks.begin(size, max(batch.size for batch in batches)))

    def _run(
        self,
        attempt: Callable[[int], Result],
        size: int,
        batch_size: int,
        changes: Changes,
        *,
        may_shrink: bool = True,
        count: bool = True,
        gives_aux: Callable[[Result], bool] = lambda result: False,
    ) -> tuple[Result, bool]:
        """Call ``attempt`` with sizes from ``size`` on down, until all ranks are through.

        Returns:
            Its result, and whether ``gives_aux`` is true of any rank's.
        """

        def together(size: int) -> Result:
            changes.put_aside()
            with self._ranks.attempt(size):
                return attempt(size)

        parts = self._largest_parts(batch_size)
        result = self._attempts.run(together, changes.restore, size, parts, may_shrink=may_shrink)
        try:
            agreed, somewhere = self._ranks.end(self._attempts.asked, batch_size, gives_aux(result))
        except BaseException:
            changes.restore()
            raise
        if count:
            self._attempts.succeeded(batch_size)
        self._attempts.agree(self._attempts.asked, agreed)
        return result, somewhere

    def _largest_parts(self, batch_size: int) -> Callable[[int], int]:
        return lambda size: max(self._ranks.sizes(batch_size, size), default=0)

    def _refuse_in_step(self, what: str) -> None:
        if self._ranks.in_step:
            raise BatchError(
                f"{what} is not for models that fully_shard has sharded, whose ranks run every pass side by side with "
                "parameters that come and go; use backward without it, or call the model without a splitter"
            )

    def _weights(self, parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], sizes: list[int]) -> list[float]:
        """What each micro-batch's loss counts in that of the batch."""
        if self._reduction != "mean":
            return [float(size > 0) for size in sizes]
        if self._normalizer is None:
            counts: list[float] = list(sizes)
            total = self._ranks.samples(sum(sizes))
        else:
            with torch.no_grad():
                counts = _as_floats([self._normalizer(*args, **kwargs) for args, kwargs in parts])
            counts = [count if size else 0.0 for count, size in zip(counts, sizes, strict=True)]
            for count in counts:
                _require(0 <= count < float("inf"), "normalizer(…)", count, "a finite count of at least 0")
            total = self._ranks.total(sum(counts))
        return [count / total if total else 0.0 for count in counts]

    def _checked_loss(self, given: Any, loss_fn: Callable[..., Any], size: int) -> Tensor:
        loss = _require_tensor(given, loss_fn)
        if self._reduction == "none" and loss.dim() and len(loss) == size:
            return loss
        if self._reduction != "none" and loss.numel() == 1:
            return loss.reshape(())
        wanted = "one loss a sample" if self._reduction == "none" else 'one number, or choose reduction="none"'
        raise BatchError(
            f"loss_fn {name_of(loss_fn)} returned shape {tuple(loss.shape)} for {size} samples; return {wanted}"
        )

    def _reduced(self, loss: Tensor, changes: Changes, *, average: bool) -> Tensor:
        """The loss on all ranks together, once their gradients have been added up."""
        try:
            loss = self._ranks.reduce(loss, average=average)
        except BaseException:
            changes.restore()
            raise
        changes.add_back()
        return loss

    # ------------------------------------------------------------------ what surrounds an attempt

    @contextmanager
    def _statistics(self, count: int, changes: Changes) -> Iterator[None]:
        norms = batch_norms(self._modules or []) if count > 1 else []
        with whole_batch_statistics(norms) if self._batch_norm == "window" else nullcontext():
            yield
        if count > 1 and not self._warned and (norms or any(map(uses_batch_statistics, changes.found))):
            self._warned = True
            _log.warning(
                "BatchNorm normalizes each micro-batch by its own statistics, so the gradients are not those of the "
                "unsplit batch: for ResNet18 and 48 images in micro-batches of 16 they are off by about 80 % of their "
                "norm; GroupNorm, LayerNorm, and BatchNorm in eval mode do not depend on the split"
            )

    @contextmanager
    def _offloaded(self, changes: Changes) -> Iterator[None]:
        with activations_on_host(changes.storages()) if self._offload else nullcontext():
            yield

    def _ran_out(self, error: BaseException, old: int, new: int) -> None:
        self._tell("on_out_of_memory", error=error, old_size=old, new_size=new)

    def _resized(self, old: int, new: int) -> None:
        self._tell("on_resize", old_size=old, new_size=new)

    def _tell(self, moment: str, **what: Any) -> None:
        if self.callbacks:
            event = Event(self, **what)
            for callback in self.callbacks:
                getattr(callback, moment)(event)


class _Replay(torch.autograd.Function):
    """Outputs that were computed without a graph, and how they are differentiated."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, splitter: BatchSplitter, passes: TwoPasses, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.splitter, ctx.passes = splitter, passes
        ctx.set_materialize_grads(False)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(result for result in results if not _is_differentiable(result)))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.splitter._replay(ctx.passes, gradients)
        return (None,) * (3 + len(gradients))


def _require_tensor(loss: Any, loss_fn: Callable[..., Any]) -> Tensor:
    if not isinstance(loss, Tensor):
        raise BatchError(f"loss_fn {name_of(loss_fn)} returned {a_kind(loss)}; it must return a tensor")
    return loss


def _one_number(loss: Any, loss_fn: Callable[..., Any]) -> Tensor:
    """Return the loss of all samples together, 0-d."""
    found = _require_tensor(loss, loss_fn)
    if found.numel() != 1:
        raise BatchError(f"loss_fn {name_of(loss_fn)} returned shape {tuple(found.shape)}; it must return one number")
    return found.reshape(())


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(_is_differentiable(tensor))


def _towers(
    encode: Callable[..., Any] | Sequence[Callable[..., Any]], batch: tuple[Any, ...], named: dict[str, Any]
) -> tuple[list[Callable[..., Any]], list[Batch]]:
    """Encoders, and the batch of each."""
    if callable(encode):
        return [encode], [Batch(batch, named)]
    if named or len(encode) != len(batch):
        raise BatchError(
            f"{len(encode)} encoders were given {len(batch)} arguments and {len(named)} named ones; several encoders "
            "take one positional argument each"
        )
    return list(encode), [Batch((argument,)) for argument in batch]


def _refuse_graphs(batch: Batch) -> None:
    for tensor in batch.tensors():
        if tensor.requires_grad and not tensor.is_leaf:
            raise BatchError(
                f"a tensor of shape {tuple(tensor.shape)} in the batch was computed with a graph, which the first "
                "micro-batch's backward pass would free; detach it, or compute it inside the function"
            )


def _as_floats(counts: list[Tensor | float]) -> list[float]:
    """Numbers and 0-d tensors as floats; one wait for the device."""
    if any(isinstance(count, Tensor) for count in counts):
        device = next(count.device for count in counts if isinstance(count, Tensor))
        return torch.stack([torch.as_tensor(count, device=device).double().reshape(()) for count in counts]).tolist()
    return [float(count) for count in counts]


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _require(fulfilled: bool, name: str, value: object, wanted: str) -> None:
    if not fulfilled:
        raise BatchError(f"{name} is {value!r}; it must be {wanted}")

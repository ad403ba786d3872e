"""Gradients of a whole batch, computed from parts of it that fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.batching.attempts import BatchAttempts, Circumstances, Limit, MicroBatchSize
from speedswap.batching.check import Checks
from speedswap.batching.escalation import Escalation
from speedswap.batching.estimate import Reserve
from speedswap.batching.memory import as_bytes
from speedswap.batching.micro_batches import MicroBatches, TwoPasses, both_passes, differentiable, towers_of
from speedswap.batching.nested import NO_AUX, Batch, is_integer, kept, key_of, name_of, require_function, tensors_of
from speedswap.batching.packing import Alone, SamplePacking, costs_of
from speedswap.batching.ranks import Replicated, Sharded, TrainingRanks, owners_of, replicas, shard_roots
from speedswap.collectives import is_distributed, of_all_ranks
from speedswap.errors import BatchError, CoupledLossError


@dataclass(frozen=True)
class Event:
    """One moment of training; fields that do not apply to it are None.

    Attributes:
        source: the splitter or training loop that fired it.
        batch_size: samples in the optimizer's batch.
        micro_batch_sizes: the sizes that it is split into.
        index: the micro-batch's number, from 0.
        loss: the micro-batch's loss as its function returned it, or the batch's; detached.
        error: the out-of-memory error.
        old_size: micro-batch size before a change, in samples, tokens or cost.
        new_size: micro-batch size after it.
        epoch: the epoch's number, from 0.
        batch: the batch's number in the epoch, from 0.
    """

    source: Any
    batch_size: int | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    index: int | None = None
    loss: Tensor | None = None
    error: BaseException | None = None
    old_size: int | None = None
    new_size: int | None = None
    epoch: int | None = None
    batch: int | None = None


class Callback:
    """Base class of callbacks; every method does nothing until it is overridden.

    A splitter calls ``before_batch`` to ``after_batch``. Training loops add the epoch and the optimizer's step, which a
    splitter does not see. An exception in a callback before ``after_batch`` ends the batch, which is rolled back as
    after any other failure.
    """

    def before_epoch(self, event: Event) -> None:
        """Run when an epoch begins."""

    def after_epoch(self, event: Event) -> None:
        """Run when an epoch is over."""

    def before_batch(self, event: Event) -> None:
        """Run before a batch is split, and again before each attempt after an out-of-memory."""

    def after_batch(self, event: Event) -> None:
        """Run when all of a batch's gradients are in place; ``event.loss`` is its loss."""

    def before_micro_batch(self, event: Event) -> None:
        """Run before a micro-batch's forward pass."""

    def before_backward(self, event: Event) -> None:
        """Run between a micro-batch's forward and backward pass; ``event.loss`` is its loss."""

    def after_micro_batch(self, event: Event) -> None:
        """Run when a micro-batch's gradients have been added."""

    def on_out_of_memory(self, event: Event) -> None:
        """Run when an attempt has run out of memory, been rolled back, and released its memory."""

    def on_resize(self, event: Event) -> None:
        """Run when the micro-batch size changes from ``event.old_size`` to ``event.new_size``."""

    def before_step(self, event: Event) -> None:
        """Run before the optimizer's step."""

    def after_step(self, event: Event) -> None:
        """Run after the optimizer's step."""


Function = TypeVar("Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")
Result = TypeVar("Result", Tensor, tuple[Tensor, Any])
Encoders = Callable[..., Any] | Sequence[Callable[..., Any]]


def coupled(loss_fn: Function) -> Function:
    """Declare that a loss compares the samples of a batch with each other, as contrastive losses do.

    :meth:`BatchSplitter.backward` refuses coupled losses, whose sum over parts of a batch is a different loss. It finds
    most undeclared ones, see ``check`` there.

    >>> @coupled
    ... def contrastive(queries, documents): ...
    """
    require_function("loss_fn", loss_fn)
    getattr(loss_fn, "__func__", loss_fn).couples_batch = True  # type: ignore[union-attr]  # a method's function
    return loss_fn


class BatchSplitter:
    """The gradients of a batch that may be larger than what fits.

    The batch is cut into micro-batches of nearly equal size, as views; their gradients add up to those of the whole
    batch, up to rounding. The exception is BatchNorm in training mode: it normalizes each micro-batch by the
    micro-batch's own statistics, as always when gradients are accumulated, updates running statistics with each, and
    gives other gradients. For ResNet18 and 48 images in micro-batches of 16 the difference is about 80 % of the
    gradient's norm.

    With ``micro_batch_size="auto"`` the batch starts whole and is halved whenever memory runs out: gradients, buffers
    and random numbers are restored and the same batch is tried again, so that it trains exactly as if the smaller size
    had been asked for. Sizes that fitted are remembered for each function, shape of a sample and class of free memory,
    and after a while without failures a larger size is tried.

    Splitting belongs to the backward pass: the optimizer's step, clipping, schedulers and averages of weights stay in
    the training loop, once per batch. Under torch's DistributedDataParallel and fully_shard the gradients, and the
    returned loss, are those of all ranks' samples together. The same holds for a model with embeddings whose rows the
    ranks own together: its other parameters then need no wrapper.

    Args:
        model: the module or modules whose parameters get gradients; by default they are found while a loss function
            runs. Other parameters are found in the loss's graph, at about a microsecond per operation.
        micro_batch_size: the most samples in one forward and backward pass, or ``"auto"``. With ``cost``, the most that
            they may cost together.
        micro_batch_tokens: the most tokens in one forward and backward pass, padding included, or ``"auto"``; in place
            of ``micro_batch_size``. The samples of a batch are packed by their lengths, which jagged tensors,
            :class:`~speedswap.batching.Padded` and :class:`~speedswap.batching.PerSample` have, and padded to the
            longest of their micro-batch alone. Losses and their weights are those of the whole batch. One sample
            above the limit is a micro-batch by itself.
        cost: as for tokens, with other costs: called as ``loss_fn`` is with the whole batch, returns a number for each
            sample. A micro-batch costs its costliest sample's number times its number of samples.
        memory: the most that a call may take beyond the memory already in use, in bytes or as text such as ``"2GiB"``:
            gradients, activations and results, with copies of earlier gradients. More is out of memory, which
            ``"auto"`` recovers from. On a GPU, torch's allocator gets no more than that from the driver, in its
            segments of 2 MiB or 20 MiB and more. Elsewhere tensors are counted, which takes about 15 microseconds per
            operation; temporary memory of kernels, and what other libraries take, is not seen. At sizes that have not
            fitted yet, an operation whose results are too large does not begin. By default there is no limit.
        reserve: what a size must leave free on each device when it is first tried, of ``memory`` or of the device, in
            bytes or as text: for fragmentation, evaluation, and other processes. Later batches may use it. On the CPU
            without ``memory`` it has no effect. Micro-batches of single samples leave nothing.
        optimizer: one or several whose state is created by their first step: until then, sizes leave room for it too.
        reduction: how ``loss_fn`` reduces its samples: ``"mean"`` (over what ``normalizer`` counts), ``"sum"``, or
            ``"none"`` for one loss per sample, whose sum is differentiated.
        normalizer: counts what the mean is over, called as ``loss_fn`` is, e.g. the targets that are not padding, or
            the sum of their class weights. Samples by default. Micro-batches that count 0 are left out.
        offload_activations: keep activations in (pinned) host memory between forward and backward pass.
        escalate: where one sample does not fit, and ``"auto"`` can split no further, save memory for time, with the
            same gradients: activations in host memory (unless the device is the CPU), then checkpointed: the modules
            that hold most, found by a forward pass, keep only their arguments and run again in the backward pass; and
            then likewise within those second runs. After ``grow_after`` batches less is tried again. Or the modules to
            checkpoint; or False for none of this. Under fully_shard, only modules that are given are checkpointed.
        check: on the first batch of each loss function that is split, compare the loss of at most eight samples
            together with their losses in two parts, and refuse a function that couples samples, averages over
            something that ``normalizer`` does not count, or computes with the whole batch around it instead of its
            arguments. That costs a few small calls of ``loss_fn``, without a graph;
            random numbers, buffers and gradients are as before. Uncertain cases pass: functions that draw random
            numbers, use batch statistics, fail for so few samples or communicate, and any under fully_shard; nor can a
            batch without ignored targets show that they are not counted.
        scaler: scales the losses; unscaling and skipping stay ``scaler.step(optimizer)``'s.
        grow_after: batches without a failure before a larger micro-batch is tried.
        callbacks: notified of each step.

    Attributes:
        callbacks: the list of callbacks, which may be changed between batches.

    >>> model = nn.Linear(3, 1)
    >>> splitter = BatchSplitter(model, micro_batch_size=10)
    >>> inputs, targets = torch.randn(64, 3), torch.randn(64, 1)
    >>> loss = splitter.backward(lambda x, y: nn.functional.mse_loss(model(x), y), inputs, targets)
    >>> bool(torch.isclose(loss, nn.functional.mse_loss(model(inputs), targets)))
    True
    """

    @of_all_ranks
    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | None = None,
        *,
        micro_batch_size: int | Literal["auto"] = "auto",
        micro_batch_tokens: int | Literal["auto"] | None = None,
        cost: Callable[..., Any] | None = None,
        memory: int | str | None = None,
        reserve: int | str | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        reduction: Literal["mean", "sum", "none"] = "mean",
        normalizer: Callable[..., Tensor | float] | None = None,
        offload_activations: bool = False,
        escalate: bool | Iterable[nn.Module] = True,
        check: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grow_after: int = 32,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        _require(reduction in ("mean", "sum", "none"), "reduction", reduction, '"mean", "sum" or "none"')
        if micro_batch_tokens is not None:
            is_alone = micro_batch_size == "auto" and cost is None
            is_possible = micro_batch_tokens == "auto" or is_integer(micro_batch_tokens)
            wanted = 'at least 1, or "auto", without micro_batch_size and cost'
            _require(is_alone and is_possible, "micro_batch_tokens", micro_batch_tokens, wanted)
            micro_batch_size = micro_batch_tokens
        self._is_packed, self._cost = micro_batch_tokens is not None or cost is not None, cost
        auto = micro_batch_size == "auto"
        _require(auto or is_integer(micro_batch_size), "micro_batch_size", micro_batch_size, 'at least 1, or "auto"')
        _require(is_integer(grow_after), "grow_after", grow_after, "at least 1")
        _require(normalizer is None or reduction == "mean", "normalizer", normalizer, 'None unless reduction is "mean"')
        for name, function in (("normalizer", normalizer), ("cost", cost)):
            if function is not None:
                require_function(name, function)
        for name, flag in (("offload_activations", offload_activations), ("check", check)):
            _require(isinstance(flag, bool), name, flag, "True or False")
        _require(scaler is None or isinstance(scaler, torch.amp.GradScaler), "scaler", scaler, "a GradScaler, or None")
        self.callbacks = _all("callbacks", callbacks, Callback)
        self._modules = None if model is None else _all("model", model, nn.Module)
        self._ranks = _ranks_of(self._modules or [])
        if offload_activations:
            self._refuse_in_step("offload_activations")
        optimizers = _all("optimizer", optimizer, torch.optim.Optimizer)
        ways = escalate if isinstance(escalate, bool) else _all("escalate", escalate, nn.Module)
        nbytes = 0 if reserve is None else as_bytes("reserve", reserve)
        common = self._common = Circumstances(
            self._modules,
            self._ranks,
            None if memory is None else as_bytes("memory", memory),
            Reserve(nbytes, optimizers) if nbytes or optimizers else None,
            Escalation(ways, offload_activations, self._ranks, remembers=self._modules is not None),
        )
        size = None if auto else int(micro_batch_size)
        self._sizes = MicroBatchSize(size, grow_after, self._tell)
        self._evaluation_sizes = MicroBatchSize(size, grow_after, self._tell)
        self._checks = Checks(reduction, normalizer, self._modules or []) if check else None
        self._micro_batches = MicroBatches(common, reduction, normalizer, scaler, self._tell)

    @property
    def micro_batch_size(self) -> int | None:
        """The size in use, by the last batch, in samples, tokens or cost; None before the first one if unknown."""
        return None if self._sizes.size is None else self._sizes.known.limit_of(self._sizes.size)

    @property
    def rung(self) -> int:
        """The number of things done so that one sample fits, by the last batch: 0 for none, see ``escalate``."""
        return 0 if self._sizes.size is None else max(0, 1 - self._sizes.size)

    def state_dict(self) -> dict[str, Any]:
        """Return the size that a resumed run begins with, so that it need not run out of memory to find it again."""
        known = self._sizes.known
        if known.size is None:
            return {"micro_batch_size": None, "rung": 0}
        alone = {"escalates_from": known.alone.cost} if known.escalates and self._is_packed else {}
        return {"micro_batch_size": known.limit_of(known.size), "rung": max(0, 1 - known.size)} | alone

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with the micro-batch size of another run; it grows again if it can. A fixed size stays."""
        is_state = isinstance(state, Mapping) and "micro_batch_size" in state
        _require(is_state, "state", state, "what a splitter's state_dict() returned")
        size = state["micro_batch_size"]
        _require(size is None or is_integer(size), "state['micro_batch_size']", size, "at least 1, or None")
        rung = state.get("rung", 0)
        _require(is_integer(rung, 0), "state['rung']", rung, "at least 0")
        alone = Alone(state.get("escalates_from", 1), size) if rung else Alone()
        self._sizes.begin_with(1 - rung if rung else size, alone)

    def backward(self, loss_fn: Callable[..., Result], /, *batch: Any, **named: Any) -> Result:
        """Add the gradients of a batch's loss to its parameters' ``grad``.

        Args:
            loss_fn: called as ``loss_fn(*micro_batch, **named)``; returns the loss of those samples, without calling
                ``backward``: one number, or for reduction ``"none"`` one per sample; or that and an aux, such as logits
                or metrics, as a tuple. It is called again after an out-of-memory, and for a few samples at first, see
                ``check``.
            batch: tensors and nested containers of them, see :class:`~speedswap.batching.nested.Batch`.
            named: the same, by name.

        Returns:
            The loss of the whole batch, detached: 0-d, or for reduction ``"none"`` of the losses' shape. Where
            ``loss_fn`` returns ``(loss, aux)``, the loss and the aux of all micro-batches of this process, in the order
            of its samples, detached: tensors concatenated along their first dimension, 0-d tensors stacked, one per
            micro-batch, and containers looked into; anything else is a list with one item per micro-batch. The
            aux of a whole batch stays in memory, so return logits rather than activations. Micro-batches that count 0
            are run without a graph for it.

        Raises:
            CoupledLossError: the loss is declared coupled, or found to be.
            BatchError: the batch or the loss cannot be split, or the loss does not average over what was declared.
            Exception: whatever ``loss_fn`` raises, out-of-memory included if one sample does not fit. Gradients,
                buffers and random numbers are as they were before the call.
        """
        with self._ranks.together("backward"):
            require_function("loss_fn", loss_fn)
            if getattr(loss_fn, "couples_batch", False):
                raise CoupledLossError(
                    f"loss_fn {name_of(loss_fn)} is declared to couple the samples of a batch, so that parts of it "
                    "have another loss; give its encoder and itself to backward_coupled"
                )
            whole = Batch(batch, named, may_be_empty=self._ranks.may_be_empty)
            whole.refuse_graphs()
            attempts = self._begin("backward", [loss_fn], [whole])
            changes = attempts.changes
            changes.gradients.note(tensor for tensor in tensors_of([batch, named]) if tensor.requires_grad)
            while attempts.again():
                aux = NO_AUX  # releases that of an attempt that fitted here and failed on another rank
                with attempts, attempts.attempt():
                    (parts,) = attempts.divided()
                    if self._checks is not None and len(parts.each) > 1 and self._ranks.may_differ:
                        self._checks.refuse_mistakes(loss_fn, whole, max(parts.sizes))
                    loss, aux = self._micro_batches.accumulate(loss_fn, parts, changes)
            loss, gives_aux = attempts.finish(loss, average=False, gives_aux=aux is not NO_AUX)
        self._tell("after_batch", batch_size=whole.size, loss=loss)
        result: Any = (loss, None if aux is NO_AUX else aux) if gives_aux else loss
        return result  # type: ignore[no-any-return]

    def backward_coupled(
        self, encode: Encoders, loss_fn: Callable[..., Result], /, *batch: Any, **named: Any
    ) -> Result:
        """Add the exact gradients of a loss that compares all samples of a batch with each other.

        Two passes: representations of all micro-batches without a graph, the loss once over all of them, and then each
        micro-batch again, with the same random numbers, for its part of the gradient. That costs one more forward pass,
        and the memory of all representations in addition to that of one micro-batch.

        Args:
            encode: returns a micro-batch's representations, one tensor or a nesting of them, first dimension samples.
                Or several functions, one for each positional argument of the batch, called with it alone: the
                arguments may then have different numbers of samples.
            loss_fn: called with the representations of the whole batch, one argument for each encoder; returns one
                number, or that and an aux as a tuple. Its own parameters get their gradients too. It may reduce its
                samples in any way, whatever ``reduction`` the splitter has.
            batch: the encoders' inputs.
            named: more of them, for a single encoder.

        Returns:
            The loss, detached, 0-d; or that and the aux as ``loss_fn`` returned it, its tensors detached.

        Raises:
            BatchError: the batch cannot be split, or the number of encoders differs from that of arguments.
            Exception: as for :meth:`backward`.
        """
        self._refuse_in_step("backward_coupled")
        encoders: list[Callable[..., Any]]
        with self._ranks.together("backward_coupled"):
            encoders, batches = towers_of(encode, batch, named)
            require_function("loss_fn", loss_fn)
            for encoder in encoders:
                require_function("encode", encoder)
            for part in batches:
                part.refuse_graphs()
            attempts = self._begin("backward", [*encoders, loss_fn], batches)
            changes = attempts.changes
            while attempts.again():
                with attempts, attempts.attempt():
                    towers = list(map(TwoPasses, encoders, attempts.divided()))
                    loss, aux = both_passes(towers, loss_fn, changes, self._micro_batches)
            loss, _ = attempts.finish(loss, average=True)
        self._tell("after_batch", batch_size=max(part.size for part in batches), loss=loss)
        result: Any = loss if aux is NO_AUX else (loss, aux)
        return result  # type: ignore[no-any-return]

    def forward(self, function: Callable[..., Any], /, *batch: Any, **named: Any) -> Any:
        """Run a function over a batch in micro-batches, differentiably, though no graph is kept.

        The outputs can be differentiated as usual. When the backward pass arrives, each micro-batch is run again, with
        the same random numbers, and its gradients are added.

        Args:
            function: called with each micro-batch; returns tensors whose first dimension counts samples.
            batch: its arguments.
            named: the same, by name.

        Returns:
            The outputs of the whole batch, joined as the aux of :meth:`backward`.

        Raises:
            BatchError: the batch or the outputs cannot be split and joined.
            Exception: whatever ``function`` raises. Running out of memory in the backward pass, which needs a little
                more than the forward pass, is recovered from unless the function draws random numbers.
        """
        if not torch.is_grad_enabled():
            return self.map(function, *batch, **named)
        self._refuse_in_step("forward")
        with self._ranks.passes():
            require_function("function", function)
            whole = Batch(batch, named)
            whole.refuse_graphs()
            attempts = self._begin("forward", [function], [whole])
            changes = attempts.changes
            while attempts.again():
                with attempts, attempts.attempt():
                    passes = TwoPasses(function, attempts.divided()[0])
                    each = passes.parts.each
                    around = self._micro_batches.one_by_one(each, changes, with_graph=True)
                    outputs = passes.first(around, changes, with_graph=True)
                    self._micro_batches.warn_of_batch_norm(len(each), changes)
        attempts.fitted()
        size, known = attempts.size, self._sizes.known
        return differentiable(outputs, lambda gradients: self._backward_of_forward(passes, size, known, gradients))

    @torch.no_grad()
    def map(self, function: Callable[..., Any], /, *batch: Any, **named: Any) -> Any:
        """Run a function over a batch in micro-batches, without gradients, as for evaluation.

        When memory runs out, the batch is tried again in smaller parts, as in training. Evaluation has sizes of its
        own: it takes less memory than training, and neither learns from the other. Gradients and buffers, such as
        running statistics, are afterwards as before.

        Ranks that each hold the whole model evaluate on their own, with any number of calls and samples. Under
        fully_shard they run side by side: all must call, each with one sample at least.

        Args:
            function: called with each micro-batch; usually the model, in eval mode.
            batch: its arguments.
            named: the same, by name.

        Returns:
            The results for the whole batch in the order of its samples, joined as the aux of :meth:`backward`: tensors
            concatenated along their first dimension, 0-d tensors stacked, one per micro-batch, and containers looked
            into. They stay in memory until all are there.

        Raises:
            BatchError: the batch or the results cannot be split and joined.
            Exception: whatever ``function`` raises, out-of-memory included if one sample does not fit.
        """
        with self._ranks.passes():
            require_function("function", function)
            whole = Batch(batch, named)
            attempts = self._begin("map", [function], [whole])
            changes = attempts.changes
            while attempts.again():
                results: list[Any] = []  # releases those of a failed attempt
                with attempts, attempts.attempt():
                    (parts,) = attempts.divided()
                    around = self._micro_batches.one_by_one(parts.each, changes)
                    for part in parts.in_turn():
                        args, kwargs = parts.arguments(part)
                        if part.size:
                            with around():
                                results.append(kept(function(*args, **kwargs)))
                        else:
                            with self._ranks.without_effect():
                                function(*args, **kwargs)
                    joined = parts.joined(results)
                    del results
            changes.restore_buffers()
            attempts.fitted()
        return joined

    def _backward_of_forward(
        self, passes: TwoPasses, size: int, known: Limit, gradients: Sequence[Tensor | None]
    ) -> None:
        packing = passes.parts.packing
        with self._ranks.together("forward"):
            self._ranks.begin(size, packing)
            self._sizes.known = known
            arguments = "second pass", self._sizes, size, [packing], [passes.function], self._device
            attempts = BatchAttempts(self._common, *arguments, may_shrink=not passes.is_random)
            changes = attempts.changes
            while attempts.again():
                with attempts, attempts.attempt():
                    (parts,) = attempts.parts = [passes.parts] if attempts.size == size else attempts.divided()
                    with changes.summing(len(parts.each)):
                        around = self._micro_batches.one_by_one(parts.each, changes, with_graph=True)
                        passes.second(gradients, parts, around, changes)
            attempts.finish(torch.zeros(()), average=True, count=False)

    def _begin(self, work: str, functions: Sequence[Callable[..., Any]], batches: Sequence[Batch]) -> BatchAttempts:
        """Return the attempts at a batch; those of a backward pass are at a size that all ranks agree on."""
        key = (*map(key_of, functions), *(batch.signature() for batch in batches))
        parameters = itertools.chain.from_iterable(module.parameters() for module in self._modules or [])
        self._device = next((parameter.device for parameter in parameters), batches[0].device)
        packings = [
            SamplePacking(
                batch, costs_of(batch, self._cost) if self._is_packed else None, side_by_side=self._ranks.in_step
            )
            for batch in batches
        ]
        largest = max(packings, key=lambda packing: packing.whole)
        sizes = self._evaluation_sizes if work == "map" else self._sizes
        size = sizes.choose(key, largest.whole, self._device)
        if work == "backward" or self._ranks.in_step:
            size = sizes.agree(size, self._ranks.begin(size, largest))
        attempts = BatchAttempts(self._common, work, sizes, size, packings, functions, self._device)
        if not self._ranks.in_step:  # there all ranks have the same number
            attempts.predict()
        return attempts

    def _refuse_in_step(self, what: str) -> None:
        if self._ranks.in_step:
            raise BatchError(
                f"{what} is not for models that fully_shard has sharded, whose ranks run every pass side by side with "
                "parameters that come and go; use backward without it, or call the model without a splitter"
            )

    def _tell(self, moment: str, **what: Any) -> None:
        if self.callbacks:
            event = Event(self, **what)
            for callback in self.callbacks:
                getattr(callback, moment)(event)


def _require(fulfilled: bool, name: str, value: object, wanted: str) -> None:
    if not fulfilled:
        raise BatchError(f"{name} is {value!r}; it must be {wanted}")


def _all(name: str, given: Any, kind: type[_Kind]) -> list[_Kind]:
    """Return the items of an argument, or the one that it is."""
    if isinstance(given, kind):
        return [given]
    items: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for item in items:
        if not isinstance(item, kind):
            raise BatchError(f"{name} is or has {a_kind(item)}; give one or several {kind.__name__}s")
    return items


def _ranks_of(modules: Sequence[nn.Module]) -> TrainingRanks:
    """Return the processes that train these modules together; every rank has to ask, in the same order.

    Raises:
        BatchError: a module is replicated or sharded in a way that cannot be split.
    """
    if not is_distributed():
        return TrainingRanks()
    wrapped, roots, group = replicas(modules), shard_roots(modules), owners_of(modules)
    if wrapped and roots:
        raise BatchError("the modules are partly replicated and partly sharded; give each kind its own splitter")
    if roots:
        return Sharded(roots, group)
    return Replicated(wrapped, modules, group) if wrapped or group is not None else TrainingRanks()

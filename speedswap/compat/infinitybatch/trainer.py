"""InfinityBatch: training by epochs, or batch by batch in a custom loop, with batches that need not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap.batching import BatchSplitter, Callback, Event
from speedswap.batching.nested import Batch, concatenate, replace_tensors
from speedswap.compat.infinitybatch.codes import InfinityBatchError
from speedswap.compat.infinitybatch.components import Components, as_list, call, moved, samples_first, unpack
from speedswap.compat.infinitybatch.containers import Containers, Strategies
from speedswap.compat.infinitybatch.losses import TrainingStep, means, reduction_of
from speedswap.monitor import EventMonitor, Level, WarningPolicy
from speedswap.monitor.parameters import modes_kept


class _Bridge(Callback):
    """A splitter's callback that calls ``tell`` with the name and the event of each call."""

    def __init__(self, tell: Callable[[str, Event], None]) -> None:
        for moment in vars(Callback):
            if not moment.startswith("_"):
                setattr(self, moment, functools.partial(tell, moment))


class InfinityBatch(Components, Containers):
    """A trainer of models with batches of any size.

    Batches are split by :class:`speedswap.BatchSplitter`: only one micro-batch's activations are in memory at a time,
    and the gradients are those of the whole batch, unless the model has BatchNorm, which normalizes each micro-batch by
    its own statistics. Torch's own criteria are differentiated micro-batch by micro-batch; any other criterion gets
    the outputs of the whole batch, as it may compare samples, at the cost of one more forward pass.

    Args:
        model: the trained model; or several, as a list or by name, with ``steps``.
        optimizer: its optimizer; or several.
        criterion: called with outputs and targets; or several.
        dataloader: yields batches of inputs and targets, see ``unpack``.
        backward_device: the device of outputs, targets and the criterion; the CPU by default.
        verbose: print the training's progress.
        micro_batch_size: samples that go through the model at once, or ``"auto"``.
        batch_norm: how often running statistics are updated, ``"micro_batch"`` or ``"window"``.
        offload_activations: keep the tensors that autograd saves in host memory between forward and backward.
        scaler: a ``torch.amp.GradScaler``.
        autocast: the dtype that the model runs in, by torch's autocast.
        scheduler: a learning rate scheduler, stepped after each epoch.
        callbacks: called at every stage; they may be changed at any time.
        containers: the storage strategy of inputs, outputs and targets: ``none`` (the default), ``last``, ``host``,
            ``statistics`` or ``disk``, for all or by name.
        steps: the steps on each batch, for several models, criteria or losses.
        unpack: returns inputs and targets of a batch of the loader. By default the targets are the last item of a
            tuple, or the item of a mapping with a usual name.
        printer: called with each printed line.
        warn: ``"off"``, ``"user"`` or ``"expert"``, or a :class:`speedswap.monitor.WarningPolicy` with
            ``speedswap.compat.infinitybatch.CODES``.

    Attributes:
        callbacks: the callbacks.
        changes: the changes of model, optimizer and criterion: replaced, moved, regrouped.
        scheduler: the scheduler; may be replaced.
        autocast: likewise.
        printer: likewise.
        policy: the policy for warnings, and how often each came up.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> ib = InfinityBatch(model, optimizer, torch.nn.MSELoss(), verbose=False, micro_batch_size=3)
    >>> ib.dataloader = [(torch.randn(8, 2), torch.randn(8, 1))]
    >>> ib(3)
    >>> [samples for epoch in ib.losses for _, samples in epoch]
    [8, 8, 8]
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        backward_device: torch.device | str | int | None = None,
        verbose: bool = True,
        *,
        micro_batch_size: int | Literal["auto"] = "auto",
        batch_norm: Literal["micro_batch", "window"] = "micro_batch",
        offload_activations: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        scheduler: Any = None,
        callbacks: Iterable[Callback] = (),
        containers: Strategies = "none",
        steps: Iterable[TrainingStep] = (),
        unpack: Callable[[Any], tuple[Any, Any]] = unpack,
        printer: Callable[[str], object] = print,
        warn: Level | WarningPolicy = "user",
    ) -> None:
        Components.__init__(self, backward_device, warn)
        Containers.__init__(self, containers)
        self.callbacks = list(callbacks)
        self.printer = printer
        self.verbose_mode = verbose
        self.scheduler, self.autocast = scheduler, autocast
        self._scaler = scaler
        self._micro_batch_size: int | Literal["auto"] = micro_batch_size
        self._batch_norm: Literal["micro_batch", "window"] = batch_norm
        self._offload = offload_activations
        self._steps = list(steps)
        self._unpack = unpack
        self._bridge = _Bridge(self._tell)
        self._splitters: dict[TrainingStep | None, BatchSplitter] = {}
        self._events: EventMonitor | None = None
        self._epoch = self._batch = -1
        self._current: tuple[Any, Any] | None = None
        self._open: int | None = None  # samples of the batch that batch_() has begun
        self._trained = [0, 0]  # batches and samples of the epoch
        self._collected: list[Any] = []
        self._outputs: Any = None
        self._loss: Tensor | None = None
        self.model, self.optimizer, self.criterion, self.dataloader = model, optimizer, criterion, dataloader

    def _replaced(self, name: str) -> None:
        self._splitters.clear()
        if name != "criterion":
            self._stop_watching()

    @property
    def micro_batch_size(self) -> int | Literal["auto"]:
        """The size in use; ``"auto"`` before the first batch. Setting it restarts with that size."""
        found = [splitter.micro_batch_size for splitter in self._splitters.values()]
        return next((size for size in found if size is not None), self._micro_batch_size)

    @micro_batch_size.setter
    def micro_batch_size(self, size: int | Literal["auto"]) -> None:
        self._micro_batch_size = size
        self._splitters.clear()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, which may skip a step."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._splitters.clear()

    @property
    def verbose_mode(self) -> bool:
        """Printing of the training's progress."""
        return self._verbose

    @verbose_mode.setter
    def verbose_mode(self, mode: bool) -> None:
        self._verbose = bool(mode)

    def _say(self, line: str) -> None:
        if self._verbose:
            self.printer(line)

    # ------------------------------------------------------------------ training by epochs

    def __call__(self, num_epochs: int) -> None:
        """Train for a number of epochs."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Train for a number of epochs, after releasing all that the containers kept of earlier ones."""
        self.clearcontainers_()
        self._epoch = -1
        self._say(f"training for {num_epochs} epochs")
        for _ in range(num_epochs):
            self.epoch()

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: the model, the optimizer, the criterion or the data loader is missing.
        """
        self._require("model", "optimizer", "dataloader", *([] if self._steps else ["criterion"]))
        self._turn_of_epoch(True)
        for batch in self._loader:
            self._take(batch)
            self._train_batch()
        self._turn_of_epoch(False)

    def _train_batch(self) -> None:
        assert self._current is not None
        inputs, targets = self._current
        losses = []
        steps: list[TrainingStep | None] = [*self._steps] or [None]
        for step in steps:
            loss = (
                self._differentiate(step, inputs, targets) if step else self._differentiate_criterion(inputs, targets)
            )
            losses.append(float(loss))
            every = self._optimizers()
            self._step(every.values() if not step or step.optimizers is None else [every[k] for k in step.optimizers])
            self.zero_grad()
        size = Batch((inputs, targets)).size
        self.losses[-1].append((losses[0] if len(losses) == 1 else tuple(losses), size))
        self._keep("inputs", inputs)
        self._keep("targets", targets)
        if self._collected:
            self._keep("outputs", concatenate(self._collected))
            self._collected = []

    def _differentiate(self, step: TrainingStep, inputs: Any, targets: Any) -> Tensor:
        def loss_fn(inputs: Any, targets: Any) -> Tensor:
            with self._precision():
                device = self._forward_device
                return step.loss(self._model, self._criterion, moved(inputs, device), moved(targets, device))

        return self._splitter(step).backward(loss_fn, inputs, targets)

    def _differentiate_criterion(self, inputs: Any, targets: Any) -> Tensor:
        if len(as_list(self._model)) != 1 or len(as_list(self._criterion)) != 1:
            raise InfinityBatchError(
                f"there are {len(as_list(self._model))} models and {len(as_list(self._criterion))} criteria; give "
                "steps=[Step(loss), …]"
            )
        splitter = self._splitter(None)
        if reduction_of(self._criterion) is not None:
            return splitter.backward(self._loss_of_part, inputs, targets)
        return splitter.backward_coupled(self._encode, functools.partial(self._criticize, targets=targets), inputs)

    def _loss_of_part(self, inputs: Any, targets: Any) -> Tensor:
        return self._criticize(self._encode(inputs), targets)

    def _criticize(self, outputs: Any, targets: Any) -> Tensor:
        if self._keeps("outputs"):
            self._collected.append(replace_tensors(outputs, Tensor.detach))
        (criterion,) = as_list(self._criterion)
        loss: Tensor = criterion(outputs, moved(targets, self._backward_device))
        return loss

    def _encode(self, inputs: Any, ambient: tuple[bool, torch.dtype] | None = None) -> Any:
        """Return the model's outputs for a micro-batch, on the backward device."""
        (model,) = self._models()
        with self._precision(ambient):
            outputs = call(model, moved(inputs, self._forward_device))
        return moved(samples_first(outputs, Batch((inputs,)).size), self._backward_device)

    def _precision(self, ambient: tuple[bool, torch.dtype] | None = None) -> AbstractContextManager[Any]:
        """Return the requested autocast, else the one around the call that began the batch."""
        kind = self._device_type()
        if self.autocast is not None:
            return torch.autocast(kind, dtype=self.autocast)
        return nullcontext() if ambient is None else torch.autocast(kind, enabled=ambient[0], dtype=ambient[1])

    def _device_type(self) -> str:
        return "cpu" if self._forward_device is None else self._forward_device.type

    def _splitter(self, step: TrainingStep | None) -> BatchSplitter:
        """Return the splitter of a step's batches; None stands for the criterion."""
        if step not in self._splitters:
            own = (step.reduction, step.normalizer) if step else reduction_of(self._criterion)
            reduction, normalizer = own or ("mean", None)
            self._splitters[step] = BatchSplitter(
                self._models(),
                micro_batch_size=self._micro_batch_size,
                reduction=reduction,
                normalizer=normalizer,
                batch_norm=self._batch_norm,
                offload_activations=self._offload,
                check=step is not None,  # the reductions of torch's own criteria are known
                scaler=self.scaler,
                callbacks=[self._bridge],
            )
        return self._splitters[step]

    # ------------------------------------------------------------------ training in a custom loop

    def batch_(self, inputs: Any = None) -> Any:
        """Return the outputs of the whole batch, on the backward device, without keeping its activations.

        A loss of them can be differentiated as usual: the backward pass runs each micro-batch again.

        Args:
            inputs: the model's inputs; by default those of the batch that ``dataloader`` yielded last.

        Raises:
            InfinityBatchError: no inputs were given or yielded; or there are several models.
        """
        self._require("model")
        if inputs is None:
            if self._current is None:
                raise InfinityBatchError("batch_() has no inputs; give them, or iterate over InfinityBatch.dataloader")
            inputs = self._current[0]
        if len(self._models()) != 1:
            raise InfinityBatchError(f"batch_() needs one model, and there are {len(self._models())}; use steps")
        self.updateforwarddevice()
        self._watch()
        self._open = Batch((inputs,)).size
        self._tell("before_batch", Event(self, batch_size=self._open))
        kind = self._device_type()
        ambient = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._outputs = self._splitter(None).forward(functools.partial(self._encode, ambient=ambient), inputs)
        self._keep("outputs", self._outputs)
        if self._current is not None:
            self._keep("inputs", self._current[0])
            self._keep("targets", self._current[1])
        return self._outputs

    def loss(self) -> Tensor:
        """Return the criterion of the last ``batch_()`` and its targets; ``backward()`` and ``losses`` keep it.

        Raises:
            InfinityBatchError: there is no batch, or no criterion.
        """
        self._require("criterion")
        if self._outputs is None or self._current is None:
            raise InfinityBatchError(
                "loss() has no outputs and targets; iterate over dataloader and call batch_() first"
            )
        (criterion,) = as_list(self._criterion)
        loss: Tensor = criterion(self._outputs, moved(self._current[1], self._backward_device))
        self._loss, self._outputs = loss, None
        if not self.losses:
            self.epochstart_()
        self.losses[-1].append((loss.item(), self._open or 0))
        return loss

    def backward(self) -> None:
        """Differentiate the loss that ``loss()`` has computed."""
        if self._loss is None:
            self.policy.warn("SW903", "backward() has nothing to differentiate; call loss() first")
            return
        loss, self._loss = self._loss, None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Step the optimizer, or all of them.

        Raises:
            InfinityBatchError: no optimizer was set.
        """
        self._require("optimizer")
        if self._open is not None:
            self._tell("after_batch", Event(self, batch_size=self._open), to_monitor=False)
            self._open = None
        self._step(self._optimizers().values())

    def _step(self, optimizers: Iterable[Optimizer]) -> None:
        self._tell("before_step", Event(self))
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        self._tell("after_step", Event(self))

    def zero_grad(self) -> None:
        """Clear the gradients of the optimizers' and the models' parameters."""
        for optimizer in self._optimizers().values():
            optimizer.zero_grad()
        for model in self._models():
            model.zero_grad()

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, dataloader: Any = None, metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    ) -> dict[str, float]:
        """Return means of metrics over a data loader, without gradients and with the models in evaluation mode.

        Args:
            dataloader: yields batches of inputs and targets; the training's own by default.
            metrics: functions by name, called with outputs and targets of each batch, each of which returns its mean
                over the batch's samples. By default the criterion, as ``loss``.

        Returns:
            Each metric's mean, weighted by samples, or by the count of the criterion's mean.

        Raises:
            InfinityBatchError: a component is missing, or the loader yields no batches.
        """
        self._require("model", *(["dataloader"] if dataloader is None else []), *([] if metrics else ["criterion"]))
        loader = self._loader if dataloader is None else getattr(dataloader, "loader", dataloader)
        self.updateforwarddevice()
        with modes_kept(self._models()):
            for model in self._models():
                model.eval()
            return means(
                metrics or {"loss": as_list(self._criterion)[0]},
                map(self._unpack, loader),
                functools.partial(self._splitter(None).map, self._encode),
                self._backward_device,
            )

    eval = evaluate

    # ------------------------------------------------------------------ stages

    def _turn_of_epoch(self, begins: bool) -> None:
        if begins:
            self.updateforwarddevice()
            self._observer.check()
            self._watch()
            self._epoch, self._batch, self._trained = self._epoch + 1, -1, [0, 0]
            self.epochstart_()
            self._tell("before_epoch", Event(self))
            return
        self._current = self._outputs = None
        if self._batch < 0:
            self.policy.warn("SW904", "the data loader gave no batches; nothing was trained")
        batches, samples = self._trained
        self._say(f"epoch {self._epoch + 1}, done: {batches} batches, {samples} samples")
        self._tell("after_epoch", Event(self))
        self._stop_watching()
        if self.scheduler is not None:
            self._step_scheduler()

    def _step_scheduler(self) -> None:
        if not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()
        elif losses := self.losses[-1]:
            self.scheduler.step(sum(loss * size for loss, size in losses) / sum(size for _, size in losses))

    def _take(self, batch: Any) -> None:
        """Remember a batch that is about to be trained with."""
        self._batch += 1
        self._current = self._unpack(batch)

    def _watch(self) -> None:
        """Attach an event monitor to the model and the optimizer, if there is exactly one of each."""
        models, optimizers = self._models(), list(self._optimizers().values())
        if self._events is None and len(models) == len(optimizers) == 1 and self.policy.level != "off":
            self._events = EventMonitor(models[0], optimizers[0], warn=self.policy)

    def _stop_watching(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _tell(self, moment: str, event: Event, *, to_monitor: bool = True) -> None:
        if moment == "before_batch":
            self._collected = []
        elif moment == "after_batch":
            self._trained = [self._trained[0] + 1, self._trained[1] + (event.batch_size or 0)]
        elif moment == "on_resize":
            where = "" if self._epoch < 0 else f"epoch {self._epoch + 1}, "
            self._say(f"{where}micro-batch size {event.old_size} → {event.new_size}")
        epoch, batch = (place if place >= 0 else None for place in (self._epoch, self._batch))
        event = replace(event, source=self, epoch=epoch, batch=batch)
        watching = [self._events] if self._events is not None and to_monitor else []
        for callback in (*watching, *self.callbacks):
            getattr(callback, moment)(event)

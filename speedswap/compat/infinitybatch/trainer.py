"""InfinityBatch: training by epochs, or batch by batch in a custom loop, with batches that need not fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.batching import BatchSplitter, Callback, Event
from speedswap.batching.nested import NO_AUX, Batch, parted, require_integer
from speedswap.compat.infinitybatch.changes import CODES, ChangeObserver, InfinityBatchError
from speedswap.compat.infinitybatch.data import (
    HostStorage,
    Strategies,
    TrainingStep,
    WatchedLoader,
    as_list,
    call,
    make_storage,
    moved,
    named,
    reduction_of,
    samples_first,
    strategies_of,
    unpack,
)
from speedswap.monitor import EventMonitor, Level, WarningPolicy, as_policy, count_parameters
from speedswap.monitor.figures import modes_kept


def devices_equal(one: torch.device, other: torch.device) -> bool:
    """Return whether two names mean the same device; one without an index is the current one."""
    here = torch.cuda.current_device() if torch.cuda.is_available() else 0
    ours, theirs = (here if device.index is None else device.index for device in (one, other))
    return one.type == other.type and ours == theirs


class _Bridge(Callback):
    """A splitter's callback that calls ``tell`` with the name and the event of each call."""

    def __init__(self, tell: Callable[[str, Event], None]) -> None:
        for moment in vars(Callback):
            if not moment.startswith("_"):
                setattr(self, moment, functools.partial(tell, moment))


def _property(name: str, doc: str, write: Callable[[Any, Any], None] | None = None) -> Any:
    """Return a property that reads ``_name``; ``write`` is called with the object and an assigned value."""
    return property(lambda self: getattr(self, f"_{name}"), write, doc=doc)


class InfinityBatch:
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
        self.policy = as_policy(warn)
        self.policy.codes = {**CODES, **self.policy.codes}
        self.callbacks, self.printer, self._verbose_mode = list(callbacks), printer, verbose
        self.scheduler, self.autocast = scheduler, autocast
        self._splitting: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "offload_activations": offload_activations,
            "scaler": scaler,
        }
        self._steps: list[TrainingStep | None] = list(steps)
        self._unpack, self._strategies = unpack, strategies_of(containers)
        self._observer = ChangeObserver(self.policy)
        self.changes = self._observer.changes
        self._bridge = _Bridge(self._tell)
        self._splitters: dict[TrainingStep | None, BatchSplitter] = {}
        self._events: EventMonitor | None = None
        self._epoch = self._batch = -1
        self._trained = [0, 0]  # batches and samples of the epoch
        unset: Any = None
        self._model = self._optimizer = self._criterion = self._forward_device = unset
        self._current = unset  # inputs and targets of the batch
        self._open = self._whole = self._loss = unset  # samples, outputs and loss of the batch that batch_() has begun
        self._backward_device = torch.device("cpu" if backward_device is None else backward_device)
        self.clearcontainers_()
        self.model, self.optimizer, self.criterion, self.dataloader = model, optimizer, criterion, dataloader

    # ------------------------------------------------------------------ components

    model = _property("model", "The model, or several.", lambda self, value: self._put("model", value))
    optimizer = _property("optimizer", "The optimizer, or several.", lambda self, value: self._put("optimizer", value))
    criterion = _property("criterion", "The criterion, or several.", lambda self, value: self._put("criterion", value))
    verbose_mode = _property(
        "verbose_mode", "Printing of the training's progress.", lambda self, mode: setattr(self, "_verbose_mode", mode)
    )

    @property
    def optimier(self) -> Any:
        """The optimizer, as infinitybatch's README spells it."""
        return self._optimizer

    @optimier.setter
    def optimier(self, optimizer: Any) -> None:
        self.policy.warn("SW901", "optimier means optimizer; spell it that way")
        self.optimizer = optimizer

    @property
    def dataloader(self) -> Any:
        """The loader; a loop over it can call ``batch_()`` without arguments."""
        return None if self._loader is None else WatchedLoader(self._loader, self._batches)

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        self._loader = dataloader.loader if isinstance(dataloader, WatchedLoader) else dataloader

    @property
    def micro_batch_size(self) -> int | Literal["auto"]:
        """The size in use; ``"auto"`` before the first batch. Setting it restarts with that size."""
        found = [splitter.micro_batch_size for splitter in self._splitters.values()]
        return next((size for size in found if size is not None), self._splitting["micro_batch_size"])

    @micro_batch_size.setter
    def micro_batch_size(self, size: int | Literal["auto"]) -> None:
        self._restart(micro_batch_size=size)

    scaler = property(
        lambda self: self._splitting["scaler"],
        lambda self, scaler: self._restart(scaler=scaler),
        doc="The gradient scaler, which may skip a step.",
    )

    def _restart(self, **settings: Any) -> None:
        """Split with other settings, by new splitters."""
        self._splitting |= settings
        self._splitters.clear()

    def _put(self, name: str, value: Any) -> None:
        """Replace a component, and observe the new one."""
        before = getattr(self, f"_{name}")
        setattr(self, f"_{name}", value)
        for key in {**named(before), **named(value)}:
            self._observer.observe(name if key == 0 else f"{name}[{key!r}]", named(value).get(key))
        if value is not before:
            self._splitters.clear()
            if name != "criterion":
                self._stop_watching()
        if name == "model":
            self.updateforwarddevice()

    def _require(self, *names: str) -> None:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise InfinityBatchError(f"{' and '.join(missing)} missing; set InfinityBatch's {', '.join(missing)} first")

    def _models(self) -> list[nn.Module]:
        return as_list(self._model)

    def count_parameters(self, example: Any = None) -> Any:
        """Count the parameters of the model, or of several, as :func:`speedswap.monitor.count_parameters` does."""
        self._require("model")
        models = self._models()
        model = models[0] if len(models) == 1 else nn.ModuleDict({str(k): m for k, m in named(self._model).items()})
        return count_parameters(model, example=example)

    # ------------------------------------------------------------------ devices

    forward_device = _property("forward_device", "The model's device; None without trainable parameters.")

    @property
    def backward_device(self) -> torch.device:
        """The device of outputs, targets and the criterion."""
        return self._backward_device

    @backward_device.setter
    def backward_device(self, device: torch.device | str | int | None) -> None:
        self._backward_device = torch.device("cpu" if device is None else device)
        self.checkdevices_()

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Move the model, and the optimizer's state with it, to another device."""
        for model in self._models():
            model.to(device)
        for optimizer in as_list(self._optimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # which puts state on the parameters' device
        self.optimizer, self.model = self._optimizer, self._model  # moved on purpose: no warning

    def updateforwarddevice(self) -> None:
        """Find the model's device."""
        parameters = (parameter for model in self._models() for parameter in model.parameters())
        self._forward_device = next((parameter.device for parameter in parameters if parameter.requires_grad), None)
        if self._model is not None and self._forward_device is None:
            self.policy.warn("SW905", "the model has no parameters that require a gradient; nothing can be trained")
        self.checkdevices_()

    def checkdevices_(self) -> None:
        """Warn, at level ``"expert"``, if forward and backward devices are the same: then nothing is moved."""
        if self._forward_device is not None and devices_equal(self._forward_device, self._backward_device):
            self.policy.warn(
                "SW902", f"forward and backward devices are both {self._forward_device}: outputs stay where they are"
            )

    # ------------------------------------------------------------------ containers

    losses = _property("losses", "``(loss, samples)`` by epoch and batch; with several steps a tuple of their losses.")
    inputs = _property("inputs", "Inputs by epoch and batch, as far as ``containers`` keeps them.")
    outputs = _property("outputs", "Outputs by epoch and batch, likewise; without their graphs.")
    targets = _property("targets", "Targets by epoch and batch, likewise.")

    def clearcontainers_(self) -> None:
        """Release all kept values."""
        self._losses: list[list[tuple[Any, int]]] = []
        for name in self._strategies:
            setattr(self, f"_{name}", [])

    def epochstart_(self) -> None:
        """Begin an epoch in each container."""
        self._losses.append([])
        for name, strategy in self._strategies.items():
            epochs: list[HostStorage] = getattr(self, name)
            if epochs and strategy == "last":  # the last value of all, not one per epoch
                epochs[-1].clear()
            epochs.append(make_storage(strategy))

    def _keeps(self, name: str) -> bool:
        return bool(getattr(self, name)) and self._strategies[name] != "none"

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            if self._keeps(name):
                getattr(self, name)[-1].append(value)

    # ------------------------------------------------------------------ training by epochs

    def train(self, num_epochs: int) -> None:
        """Train for a number of epochs, after releasing all that the containers kept of earlier ones."""
        require_integer("num_epochs", num_epochs, 0)
        self.clearcontainers_()
        self._epoch = -1
        self._say(f"training for {num_epochs} epochs")
        for _ in range(num_epochs):
            self.epoch()

    def __call__(self, num_epochs: int) -> None:
        """Train for a number of epochs."""
        self.train(num_epochs)

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: the model, the optimizer, the criterion or the data loader is missing.
        """
        self._require("model", "optimizer", "dataloader", *([] if self._steps else ["criterion"]))
        for _ in self.dataloader:
            self._train_batch()

    def _train_batch(self) -> None:
        inputs, targets = self._current
        losses, optimizers = [], named(self._optimizer)
        for step in self._steps or [None]:
            loss, outputs = parted(self._differentiate(step, inputs, targets))
            losses.append(float(loss))
            if outputs is not NO_AUX:
                self._keep(outputs=outputs)
            stepping = optimizers if step is None or step.optimizers is None else step.optimizers
            self._step([optimizers[key] for key in stepping])
            self.zero_grad()
        self._losses[-1].append((losses[0] if len(losses) == 1 else tuple(losses), Batch((inputs, targets)).size))
        self._keep(inputs=inputs, targets=targets)

    def _differentiate(self, step: TrainingStep | None, inputs: Any, targets: Any) -> Any:
        """Add the gradients of a step's loss, or of the criterion; return the loss, and the outputs that are kept."""

        def loss_fn(inputs: Any, targets: Any) -> Any:
            if step is None:
                return self._criticize(self._encode(inputs), targets)
            with self._precision():
                device = self._forward_device
                return step.loss(self._model, self._criterion, moved(inputs, device), moved(targets, device))

        splitter = self._splitter(step)
        models, criteria = self._models(), as_list(self._criterion)
        if step is None and (len(models), len(criteria)) != (1, 1):
            raise InfinityBatchError(
                f"there are {len(models)} models and {len(criteria)} criteria; give steps=[Step(loss), …]"
            )
        if step is None and reduction_of(self._criterion) is None:
            return splitter.backward_coupled(self._encode, functools.partial(self._criticize, targets=targets), inputs)
        return splitter.backward(loss_fn, inputs, targets)

    def _criticize(self, outputs: Any, targets: Any) -> Any:
        (criterion,) = as_list(self._criterion)
        loss: Tensor = criterion(outputs, moved(targets, self._backward_device))
        return (loss, outputs) if self._keeps("outputs") else loss

    def _encode(self, inputs: Any) -> Any:
        """Return the model's outputs for a micro-batch, on the backward device."""
        (model,) = self._models()
        with self._precision():
            outputs = call(model, moved(inputs, self._forward_device))
        return moved(samples_first(outputs, Batch((inputs,)).size), self._backward_device)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast((self._forward_device or torch.device("cpu")).type, dtype=self.autocast)

    def _splitter(self, step: TrainingStep | None) -> BatchSplitter:
        """Return the splitter of a step's batches; None stands for the criterion."""
        if step not in self._splitters:
            own = (step.reduction, step.normalizer) if step else reduction_of(self._criterion)
            self._splitters[step] = BatchSplitter(
                self._models(),
                reduction=own[0] if own else "mean",
                normalizer=own[1] if own else None,
                check=step is not None,  # the reductions of torch's own criteria are known
                callbacks=[self._bridge],
                **self._splitting,
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
        self._whole = self._splitter(None).forward(self._encode, inputs)
        self._keep(outputs=self._whole)
        if self._current is not None:
            self._keep(inputs=self._current[0], targets=self._current[1])
        return self._whole

    def loss(self) -> Tensor:
        """Return the criterion of the last ``batch_()`` and its targets; ``backward()`` and ``losses`` keep it.

        Raises:
            InfinityBatchError: there is no batch, or no criterion.
        """
        self._require("criterion")
        if self._whole is None or self._current is None:
            raise InfinityBatchError(
                "loss() has no outputs and targets; iterate over dataloader and call batch_() first"
            )
        (criterion,) = as_list(self._criterion)
        loss: Tensor = criterion(self._whole, moved(self._current[1], self._backward_device))
        self._loss, self._whole = loss, None
        if not self._losses:
            self.epochstart_()
        self._losses[-1].append((loss.item(), self._open or 0))
        return loss

    def backward(self) -> None:
        """Differentiate the loss that ``loss()`` has computed."""
        if self._loss is None:
            self.policy.warn("SW903", "backward() has nothing to differentiate; call loss() first")
            return
        loss, self._loss = self._loss, None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """Step the optimizer, or all of them.

        Raises:
            InfinityBatchError: no optimizer was set.
        """
        self._require("optimizer")
        if self._open is not None:
            self._tell("after_batch", Event(self, batch_size=self._open), to_monitor=False)
            self._open = None
        self._step(as_list(self._optimizer))

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
        for one in (*as_list(self._optimizer), *self._models()):
            one.zero_grad()

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
        metrics = metrics or {"loss": as_list(self._criterion)[0]}
        sums, weights = dict.fromkeys(metrics, 0.0), dict.fromkeys(metrics, 0.0)
        self.updateforwarddevice()
        with modes_kept(self._models()):
            for model in self._models():
                model.eval()
            for inputs, targets in map(self._unpack, loader):
                outputs, targets = self._splitter(None).map(self._encode, inputs), moved(targets, self._backward_device)
                for name, metric in metrics.items():
                    kind, normalizer = reduction_of(metric) or ("mean", None)
                    value = float(metric(outputs, targets))
                    weight = float(normalizer(inputs, targets) if normalizer else Batch((inputs,)).size)
                    if weight:
                        sums[name] += value if kind == "sum" else value * weight
                        weights[name] += weight
        if not any(weights.values()):
            raise InfinityBatchError("the data loader gave no batches to evaluate")
        return {name: sums[name] / weights[name] if weights[name] else math.nan for name in metrics}

    eval = evaluate

    # ------------------------------------------------------------------ stages

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Yield an epoch's batches, each remembered while it is trained with."""
        self.updateforwarddevice()
        self._observer.check()
        self._watch()
        self._epoch, self._batch, self._trained = self._epoch + 1, -1, [0, 0]
        self.epochstart_()
        self._tell("before_epoch", Event(self))
        for batch in loader:
            self._batch += 1
            self._current = self._unpack(batch)
            yield batch
        self._current = self._whole = None
        if self._batch < 0:
            self.policy.warn("SW904", "the data loader gave no batches; nothing was trained")
        batches, samples = self._trained
        self._say(f"epoch {self._epoch + 1}, done: {batches} batches, {samples} samples")
        self._tell("after_epoch", Event(self))
        self._stop_watching()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if losses := self._losses[-1]:
                self.scheduler.step(sum(loss * size for loss, size in losses) / sum(size for _, size in losses))
        elif self.scheduler is not None:
            self.scheduler.step()

    def _watch(self) -> None:
        """Attach an event monitor to the model and the optimizer, if there is exactly one of each."""
        models, optimizers = self._models(), as_list(self._optimizer)
        if self._events is None and len(models) == len(optimizers) == 1 and self.policy.level != "off":
            self._events = EventMonitor(models[0], optimizers[0], warn=self.policy)

    def _stop_watching(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _say(self, line: str) -> None:
        if self._verbose_mode:
            self.printer(line)

    def _tell(self, moment: str, event: Event, *, to_monitor: bool = True) -> None:
        if moment == "after_batch":
            self._trained = [self._trained[0] + 1, self._trained[1] + (event.batch_size or 0)]
        elif moment == "on_resize":
            where = "" if self._epoch < 0 else f"epoch {self._epoch + 1}, "
            self._say(f"{where}micro-batch size {event.old_size} → {event.new_size}")
        epoch, batch = (place if place >= 0 else None for place in (self._epoch, self._batch))
        event = replace(event, source=self, epoch=epoch, batch=batch)
        watching = [self._events] if self._events is not None and to_monitor else []
        for callback in (*watching, *self.callbacks):
            getattr(callback, moment)(event)

"""Callbacks of a splitter or a training loop: a record of each batch, a progress bar, a monitor of missing calls."""

from __future__ import annotations

import csv
import functools
import json
import math
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind, require_kind
from speedswap.batching import Callback, Event
from speedswap.batching.nested import is_integer
from speedswap.monitor.codes import Level, WarningPolicy, as_policy
from speedswap.monitor.figures import default_device, import_optional, memory_snapshot

Row = dict[str, Any]


class TakesScalars(Protocol):
    """The common interface of TensorBoard's ``SummaryWriter`` and similar writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record one figure of one step."""


class SplitRecorder(Callback):
    """A splitter's callback that keeps one row per batch, and writes it to files or TensorBoard.

    A row has ``step``, ``seconds``, ``batch_size``, ``micro_batch_size`` (the largest part), ``micro_batches``,
    ``loss``, ``memory_bytes`` (the peak during the batch where the device's allocator reports it, else the process's
    resident memory), ``out_of_memory`` (failed attempts) and ``epoch`` (None unless a training loop reports it).

    Args:
        targets: written after each batch as well: paths (``.jsonl``, ``.csv``; existing files are continued) or
            anything with ``add_scalar``, such as ``torch.utils.tensorboard.SummaryWriter``, which the caller must
            close. In JSON, NaN and infinities are strings.
        device: the device whose memory is recorded; by default the current CUDA device, else the process's.
        limit: the number of rows that are kept; None for all.

    Attributes:
        rows: the rows.

    Raises:
        ValueError: a target is none of these.

    >>> recorder = SplitRecorder()
    >>> recorder.before_batch(Event(None, batch_size=8, micro_batch_sizes=(4, 4)))
    >>> recorder.after_batch(Event(None, batch_size=8, loss=torch.tensor(0.5)))
    >>> row = recorder.rows[0]
    >>> row["micro_batch_size"], row["micro_batches"], row["loss"]
    (4, 2, 0.5)
    """

    def __init__(
        self,
        *targets: str | Path | TakesScalars,
        device: torch.device | str | None = None,
        limit: int | None = 100_000,
    ) -> None:
        self.rows: list[Row] = []
        self._finish: list[Callable[[], Any]] = []
        self._writers = [self._writer(target) for target in targets]
        self._device = default_device() if device is None else torch.device(device)
        self._limit = limit
        self._begin = time.perf_counter()
        self._step = self._failures = 0
        self._sizes: tuple[int, ...] = ()
        self._attempted = False

    def _writer(self, target: str | Path | TakesScalars) -> Callable[[Row], Any]:
        if not isinstance(target, (str, Path)):
            if not callable(getattr(target, "add_scalar", None)):
                raise ValueError(f"target is {a_kind(target)}; it must be a path, or have add_scalar")
            self._finish.append(getattr(target, "flush", lambda: None))
            return functools.partial(_add_scalars, target)
        suffix = Path(target).suffix
        if suffix not in (".jsonl", ".csv"):
            raise ValueError(f"target is {str(target)!r}; its name must end in .jsonl or .csv")
        file = open(target, "a", buffering=1, newline="", encoding="utf-8")  # noqa: SIM115  (each line is flushed)
        self._finish.append(file.close)
        if suffix == ".jsonl":
            return lambda row: file.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
        return functools.partial(_write_csv, csv.writer(file), file)

    def before_batch(self, event: Event) -> None:
        """Note the sizes of an attempt."""
        self._sizes = event.micro_batch_sizes or ()
        if not self._attempted and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._attempted = True

    def on_out_of_memory(self, event: Event) -> None:
        """Count a failed attempt."""
        self._failures += 1

    def after_batch(self, event: Event) -> None:
        """Add the batch's row."""
        memory = memory_snapshot(self._device, synchronize=False)
        row = {
            "step": self._step,
            "seconds": time.perf_counter() - self._begin,
            "batch_size": event.batch_size,
            "micro_batch_size": max(self._sizes, default=event.batch_size),
            "micro_batches": len(self._sizes) or 1,
            "loss": None if event.loss is None else _number(event.loss),
            "memory_bytes": memory.peak if memory.source == "allocator" else memory.allocated,
            "out_of_memory": self._failures,
            "epoch": event.epoch,
        }
        self.rows.append(row)
        if self._limit is not None:
            del self.rows[: max(0, len(self.rows) - self._limit)]
        for write in self._writers:
            write(row)
        self._step += 1
        self._failures, self._attempted = 0, False

    def column(self, name: str) -> list[Any]:
        """Return one figure of every row, for plotting."""
        return [row[name] for row in self.rows]

    def close(self) -> None:
        """Close the files and flush the other targets; rows of later batches are kept, but written nowhere."""
        for finish in self._finish:
            finish()
        self._finish.clear()
        self._writers.clear()


class Progress(Callback):
    """A callback that shows the samples of each epoch on a tqdm bar, with the loss and the micro-batch size.

    Without a training loop that reports epochs, one bar lasts until ``close``.

    Args:
        **options: arguments of ``tqdm.auto.tqdm``, such as ``total``, the samples in an epoch.

    Raises:
        ImportError: tqdm is not installed.

    """

    def __init__(self, **options: Any) -> None:
        self._tqdm = import_optional("tqdm.auto").tqdm
        self._options = {"unit": " samples", **options}
        self._bar: Any = None
        self._sizes: tuple[int, ...] = ()

    def _opened(self) -> Any:
        if self._bar is None:
            self._bar = self._tqdm(**self._options)
        return self._bar

    def before_epoch(self, event: Event) -> None:
        """Begin a new bar."""
        self.close()
        if event.epoch is not None:
            self._opened().set_description(f"epoch {event.epoch + 1}")

    def before_batch(self, event: Event) -> None:
        """Note the sizes of an attempt."""
        self._sizes = event.micro_batch_sizes or ()

    def after_batch(self, event: Event) -> None:
        """Add the batch's samples."""
        figures = {} if event.loss is None else {"loss": _number(event.loss)}
        if self._sizes:
            figures["micro_batch_size"] = max(self._sizes)
        self._opened().set_postfix(figures, refresh=False)
        self._bar.update(event.batch_size or 0)

    def after_epoch(self, event: Event) -> None:
        """End the bar."""
        self.close()

    def close(self) -> None:
        """End the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _number(loss: Tensor) -> float:
    return float(loss.detach().float().mean())


def _write_csv(writer: Any, file: IO[str], row: Row) -> None:
    if not file.tell():
        writer.writerow(row)  # its names
    writer.writerow(row.values())


def _add_scalars(target: TakesScalars, row: Row) -> None:
    for name, value in row.items():
        if name != "step" and value is not None:
            target.add_scalar(name, value, row["step"])


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- calls left out of a hand-written loop ---------------------------------------------------------------------------

# The most gradients to read after a step; each read waits for the device.
MOST_LOOKS = 3


class EventMonitor(Callback):
    """A monitor that warns when a training loop leaves out a call.

    It listens through torch's public hooks: one on each parameter for its gradient, two on the optimizer for its step.
    That costs about two microseconds per parameter and pass. Nothing is copied, and it waits for a device only after
    the first steps, and where code other than backward wrote into gradients between two passes.

    Use it as a context manager, or ``close`` it, which removes the hooks and reports gradients that are left over;
    ``end_epoch`` reports them in between.

    As a callback of a :class:`speedswap.BatchSplitter` it counts a split batch as one backward pass.

    Args:
        model: the trained model.
        optimizer: its optimizer.
        accumulation_steps: intended number of backward passes per step; None for any.
        warn: a level (``"off"``, ``"user"``, ``"expert"``) or a :class:`WarningPolicy`.

    Attributes:
        policy: the warnings' policy; ``policy.counts`` counts each code.
        backward_passes: backward passes since the last step.
        steps: optimizer steps.

    Raises:
        ValueError: accumulation_steps is below 1.

    >>> import warnings
    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with warnings.catch_warnings(record=True) as said, EventMonitor(model, optimizer) as monitor:
    ...     warnings.simplefilter("always")
    ...     optimizer.step()
    >>> said[0].message.code
    'SW101'
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        accumulation_steps: int | None = 1,
        warn: Level | WarningPolicy = "user",
    ) -> None:
        if accumulation_steps is not None and not is_integer(accumulation_steps):
            raise ValueError(f"accumulation_steps is {accumulation_steps!r}; it must be at least 1, or None for any")
        require_kind("model", model, nn.Module, "a torch.nn.Module")
        require_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        self.model, self.optimizer = model, optimizer
        self.accumulation_steps = accumulation_steps
        self.policy = as_policy(warn)
        self.backward_passes = 0
        self.steps = 0
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._reached: set[int] = set()  # parameters that have had a gradient since the last step
        self._in_pass: set[int] = set()  # the same, in this backward pass
        self._stepped = False  # whether a step has used the present gradients
        self._stepping = False
        self._last: Tensor | None = None  # the parameter whose gradient came last
        self._last_grad = (0, 0)  # the id of that gradient, and its version then
        self._looks = 0
        self._one_pass = False  # a splitter's micro-batches are one pass
        self._pass_begun = False
        self._before_batch = (0, frozenset[int](), False)
        self._kept_by_splitter: bool | None = None
        self._parameter_handles: list[Any] = []
        self._hooked = 0
        handles = [
            optimizer.register_step_pre_hook(_weakly(self._before_step)),
            optimizer.register_step_post_hook(_weakly(self._after_step)),
        ]
        self._finalizer = weakref.finalize(self, _remove, handles, self._parameter_handles)
        self._listen_to_parameters()
        self._compare_parameters()

    def __enter__(self) -> EventMonitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._forget_window()
        self.close()

    def close(self) -> None:
        """Stop listening, and warn if gradients are left over; a second call does nothing."""
        if self._finalizer.alive:
            self._finalizer()
            self._left_over("at the end")

    def end_epoch(self) -> None:
        """Warn if gradients that no step has used are left over."""
        self._left_over("at the end of the epoch")

    # Callback of a splitter or a training loop -----------------------------------------------------------------------

    def before_batch(self, event: Event) -> None:
        """Count a splitter's micro-batches as one pass from here on."""
        self._one_pass, self._pass_begun = True, False
        # A splitter may take half-precision gradients away while it sums them in float32.
        self._kept_by_splitter = None if event.micro_batch_sizes is None else self._kept(None)
        self._before_batch = (self.backward_passes, frozenset(self._reached), self._stepped)

    def after_batch(self, event: Event) -> None:
        """Remember the gradients, which may not be the tensors that backward added to."""
        self._one_pass = False
        given = [parameter for parameter in _parameters(self.optimizer) if parameter.grad is not None]
        if given and not self._pass_begun:  # they bypassed the parameters' hooks
            self._begin_pass(given[0])
        for parameter in given:
            self._reach(parameter)

    def on_out_of_memory(self, event: Event) -> None:
        """Forget the attempt, which was rolled back."""
        self.backward_passes, reached, self._stepped = self._before_batch
        self._reached = set(reached)
        self._in_pass.clear()
        self._pass_begun = False

    def after_epoch(self, event: Event) -> None:
        """Call ``end_epoch``."""
        self.end_epoch()

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _listen_to_parameters(self) -> None:
        """Put hooks on the optimizer's parameters, in place of earlier ones; they do not keep the monitor alive."""
        accumulated = _weakly(self._accumulated)
        _remove(self._parameter_handles)
        for parameter in _parameters(self.optimizer):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
                self._parameter_handles.append(hook)
        self._hooked = len(_parameters(self.optimizer))

    def _accumulated(self, parameter: Tensor) -> None:
        if not self._in_pass or id(parameter) in self._in_pass:
            self._begin_pass(parameter)
        self._reach(parameter)

    def _reach(self, parameter: Tensor) -> None:
        """Remember that a parameter has a gradient of this pass, and that gradient."""
        self._in_pass.add(id(parameter))
        self._reached.add(id(parameter))
        if (grad := parameter.grad) is not None:
            self._last, self._last_grad = parameter, (id(grad), grad._version)

    def _begin_pass(self, parameter: Tensor) -> None:
        known = self._kept_by_splitter if self._one_pass else None
        kept = self._kept(parameter) if known is None else known
        self._in_pass.clear()
        if self._one_pass and self._pass_begun:
            return
        self._pass_begun = True
        if self._stepped:
            if kept:
                self.policy.warn(
                    "SW103",
                    "this backward pass adds to gradients that a step has already used; call optimizer.zero_grad() "
                    "after each step",
                )
            self._forget_window()
        elif self.backward_passes and not kept:
            if not self._stepping:
                self.policy.warn(
                    "SW110",
                    f"the gradients of {self.backward_passes} backward pass(es) were zeroed before a step used"
                    " them; a step that a GradScaler skips does this too",
                )
            self._forget_window()
        self.backward_passes += 1
        wanted = self.accumulation_steps
        if wanted is not None and self.backward_passes > wanted:
            self.policy.warn(
                "SW102",
                f"backward ran {self.backward_passes} times without a step, where accumulation_steps is {wanted}; "
                "step after each, or give the monitor the intended accumulation_steps",
            )

    def _kept(self, parameter: Tensor | None) -> bool:
        """Return whether the previous pass's gradients remain, now that ``parameter`` has the first of this pass.

        A gradient that was zeroed in place has another version than when it was last added to; but clipping or a
        reduction over ranks may have written into it too, so its values are read. After steps that is done a few times
        only, since loops that zero in place do so after each.
        """
        if self._last is None or (grad := self._last.grad) is None:
            return False
        number, version = self._last_grad
        if self._last is parameter:  # this pass has added to it
            return (id(grad), grad._version) == (number, version + 1)
        if grad._version == version:
            return True
        if self._stepped:
            self._looks += 1
            if self._looks > MOST_LOOKS:
                return False
        with torch._C.DisableTorchFunctionSubclass():  # without communicating with ranks that hold other parts of it
            return bool(grad.any())

    def _before_step(self, *_: Any) -> None:
        self._stepping, self._one_pass = True, False
        if len(_parameters(self.optimizer)) != self._hooked:
            self._listen_to_parameters()
        if self.policy.wants("SW108") and not self.model.training:
            self.policy.warn(
                "SW108", "the model is in evaluation mode, so dropout and batch statistics are off; call model.train()"
            )

    def _after_step(self, *_: Any) -> None:
        """Judge a finished step; closures (L-BFGS) have run their backward passes inside it."""
        self._stepping = False
        self.steps += 1
        wanted = self.accumulation_steps
        if self._stepped or not self.backward_passes:
            self.policy.warn(
                "SW101", "optimizer.step() without a backward pass since its last step; call loss.backward() first"
            )
        elif wanted is not None and self.backward_passes < wanted:
            self.policy.warn(
                "SW109",
                f"a step after {self.backward_passes} of {wanted} backward passes; scale the loss of a last, partial "
                "window by its own number of passes",
            )
        if not self._stepped and self.backward_passes and self.policy.wants("SW105"):
            self._warn_of(
                [p for p in _parameters(self.optimizer) if p.requires_grad and id(p) not in self._reached],
                "SW105",
                "no gradient in this step for {}; freeze unused parameters with requires_grad_(False), or check that "
                "the loss depends on it",
            )
        self._stepped = True
        self._reached.clear()
        self._in_pass.clear()
        if self._last is not None and self._last.grad is not None:
            self._last_grad = (self._last_grad[0], self._last.grad._version)  # clipping and unscaling wrote into it

    def _compare_parameters(self) -> None:
        """Warn about parameters that only the model or only the optimizer has."""
        held = {id(parameter) for parameter in _parameters(self.optimizer)}
        self._warn_of(
            [p for p in self.model.parameters() if p.requires_grad and id(p) not in held],
            "SW106",
            "trainable but not in the optimizer: {}; add the ones to be trained, and freeze the rest with "
            "requires_grad_(False)",
        )
        self._warn_of(
            [p for p in _parameters(self.optimizer) if id(p) not in self._names],
            "SW107",
            "the optimizer has parameters that are not the model's, {}; make it from this model's parameters",
        )

    def _left_over(self, when: str) -> None:
        if self.backward_passes and not self._stepped and self._kept(None):
            self.policy.warn(
                "SW104",
                f"{when}, the gradients of {self.backward_passes} backward pass(es) were not used by a step; step "
                "after the last, partial window too",
            )
        if not self._stepped:
            self._forget_window()

    def _forget_window(self) -> None:
        self.backward_passes = 0
        self._reached.clear()
        self._in_pass.clear()
        self._stepped = False

    def _warn_of(self, parameters: Sequence[Tensor], code: str, detail: str) -> None:
        """Warn of parameters, if there are any; they stand for the braces of the warning."""
        names = [self._names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            self.policy.warn(code, detail.format(", ".join(names[:3]) + more))


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _remove(*lists: list[Any]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
        handles.clear()

"""A check, on a few samples before a batch is split, that a loss is as declared to the splitter.

The loss of a few samples together is compared with their losses in parts, weighed as micro-batches are. Where the two
differ by more than rounding can explain, the losses of more such parts show the reason. Where anything else can make
them differ (random numbers, batch statistics, a function that gives another result each time), no error is raised.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedswap.batching.memory import storages
from speedswap.batching.nested import Batch, counted, key_of, kind_of, loss_of, name_of, tensors_of
from speedswap.batching.retry import Search
from speedswap.batching.rollback import DryRun, Watcher
from speedswap.errors import BatchError, CoupledLossError, PeerError, SpeedswapError

_log = logging.getLogger("speedswap")

SAMPLES = 8
_MOST_CHECKS = 8  # per function's code, if it refers to something of another kind each time

# Kernels of another batch size round otherwise, layer after layer, so a difference of a few machine epsilons proves
# nothing, nor does one below 1e-3 whatever the precision. Real mistakes are larger.
_LEAST_DIFFERENCE = 1e-3
_EPSILONS_OF_LOSS = 8
_EPSILONS_OF_LARGEST = 2  # where the loss is the small difference of large values


class Checks:
    """The loss functions that a splitter has compared with their declaration, each once.

    Args:
        reduction: as of a splitter.
        normalizer: likewise.
        modules: those whose buffers a loss function may change.
    """

    def __init__(
        self, reduction: str, normalizer: Callable[..., Tensor | float] | None, modules: Sequence[nn.Module]
    ) -> None:
        self.reduction = reduction
        self.normalizer = normalizer
        self._modules = modules
        self._kinds: set[Hashable] = set()
        self._times: Counter[Hashable] = Counter()

    def refuse_mistakes(self, loss_fn: Callable[..., Any], batch: Batch, size: int) -> None:
        """Check a loss function that has not been split before, on fewer samples where memory runs out.

        Args:
            loss_fn: the user's.
            batch: the samples are taken from it.
            size: of a micro-batch.

        Raises:
            CoupledLossError: the loss couples the samples of a batch.
            BatchError: it does not average over what was declared.
        """
        kind, code = kind_of(loss_fn), key_of(loss_fn)
        if kind in self._kinds or self._times[code] >= _MOST_CHECKS:
            return

        def compare(count: int) -> SpeedswapError | None:
            if count < 2:
                return None
            seen = _Precision(count)
            with DryRun(seen, self._modules) as run:
                return _Comparison(self, loss_fn, batch, count, run, seen).mistake()

        mistake = None
        try:
            mistake = Search(name_of(loss_fn), min(batch.size, SAMPLES, max(2, size))).run_batch(compare)
        except Collective:
            pass
        except PeerError:
            raise
        except Exception as error:
            _log.debug("the loss function was not checked, as it fails for a few samples: %r", error)
        if mistake is not None:
            raise mistake
        self._times[code] += 1
        self._kinds.add(kind)


@dataclass(eq=False)
class _Comparison:
    """Losses of a few samples together and apart."""

    declared: Checks
    loss_fn: Callable[..., Any]
    batch: Batch
    count: int
    run: DryRun
    seen: _Precision

    def __post_init__(self) -> None:
        samples, count = few_samples(self.batch, self.count), self.count
        first = max(1, (count - 1) // 2)  # unequal parts, or what both count equally would not show
        second = first + max(1, (count - first) // 2)
        self._parts = [part for part in (samples[:first], samples[first:second], samples[second:]) if part]
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._captured: BatchError | None = None

    def mistake(self) -> SpeedswapError | None:
        """Return an error if the losses together and apart certainly differ."""
        everything = tuple(range(len(self._parts)))
        apart = [(0,), everything[1:]]
        try:
            whole = self._of(everything)
        except Exception:
            if self._captured is None:
                raise
        if self._captured is not None:
            return self._captured
        if not self._is_certain or not bool(whole.isfinite().all()):
            return None
        weights = self._weights(apart)
        if weights is None:
            return None
        parts = [self._of(one) if weight else torch.zeros(()) for one, weight in zip(apart, weights, strict=True)]
        if self.declared.reduction == "none":
            expected = torch.cat(parts)
        else:
            expected = sum((part * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros(()))
        difference = _distance(whole, expected)
        if difference <= self._tolerance() or not self._is_certain:
            return None
        if self._changes() > difference / 100:
            return None
        why = "couples" if self.declared.reduction == "none" else self._why()
        return self._error(why, whole, expected) if self._is_certain else None

    @property
    def _is_certain(self) -> bool:
        """True if the same samples give the same result again, in any company."""
        return not self.seen.depends_on_batch and not self.run.has_changed

    def _changes(self) -> float:
        """Return how much the losses differ when computed again, as those of a function with state do."""
        return max(_distance(self._evaluate(parts), loss) for parts, loss in self._known.items())

    def _of(self, parts: tuple[int, ...]) -> Tensor:
        if parts not in self._known:
            self._known[parts] = self._evaluate(parts)
        return self._known[parts]

    def _evaluate(self, parts: tuple[int, ...]) -> Tensor:
        """Compute the loss of some parts together, in float64 on the CPU."""
        args, kwargs = self._take(parts)
        with self._watching(Batch(args, kwargs)):
            result = self.loss_fn(*args, **kwargs)
        loss, _ = loss_of(result, self.loss_fn, self.declared.reduction, self._samples_in(parts))
        return loss.detach().double().cpu()

    @contextmanager
    def _watching(self, part: Batch) -> Iterator[None]:
        """Record an error if the loss function computes with the whole batch instead of the part that it is given."""
        columns = [
            (place, *storages(tensor), *storages(given))
            for place, (tensor, given) in enumerate(zip(self.batch.columns(), part.columns(), strict=True))
            if storages(tensor) and storages(given)
        ]
        self.seen.watched = {address for _, *both in columns for address in both}
        self.seen.read.clear()
        try:
            yield
        finally:
            self.seen.watched = set()
            for place, whole, given in columns:
                if whole in self.seen.read and given not in self.seen.read and self._captured is None:
                    self._captured = BatchError(
                        f"loss_fn {name_of(self.loss_fn)} computes with a tensor of all samples of the batch, and not "
                        f"with the part of it that is argument {place}: each micro-batch would be as large as the "
                        "batch; use the argument, or turn this check off with check=False"
                    )

    def _take(self, parts: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.batch.take([index for part in parts for index in self._parts[part]])

    def _samples_in(self, parts: tuple[int, ...]) -> int:
        return sum(len(self._parts[part]) for part in parts)

    def _weights(self, apart: Sequence[tuple[int, ...]]) -> list[float] | None:
        """Return the weights that a splitter would give each; None if all weights are zero."""
        if self.declared.reduction != "mean":
            return [1.0] * len(apart)
        if self.declared.normalizer is None:
            counts = [float(self._samples_in(one)) for one in apart]
        else:
            counts = [float(counted(self.declared.normalizer, *self._take(one))) for one in apart]
        total = sum(counts)
        if not 0 < total < math.inf or min(counts) < 0:  # invalid counts are refused when the batch is weighed
            return None
        return [count / total for count in counts]

    def _tolerance(self) -> float:
        """Return the difference up to which two losses may be the same one, differently rounded."""
        eps = self.seen.eps
        values = torch.cat([loss.reshape(-1) for loss in self._known.values()])
        values = values[values.isfinite()].abs()
        size = float(values.max()) if len(values) else 0.0
        of_loss = max(_LEAST_DIFFERENCE, _EPSILONS_OF_LOSS * eps) * size
        return of_loss + _EPSILONS_OF_LARGEST * eps * self.seen.largest

    def _why(self) -> str:
        """Return the kind of mistake, from the losses of all subsets of the parts."""
        places = range(len(self._parts))
        subsets = [subset for count in range(1, len(places) + 1) for subset in itertools.combinations(places, count)]
        losses = {subset: float(self._of(subset)) for subset in subsets}
        tolerance = self._tolerance()

        def are_means(weights: Sequence[float]) -> bool:
            """Return whether the losses are means with these weights; parts of weight 0 may have any loss, even NaN."""
            for subset, loss in losses.items():
                total = sum(weights[place] for place in subset)
                weighted = sum(weights[place] * losses[place,] for place in subset if weights[place])
                if total and len(subset) > 1 and not abs(weighted / total - loss) <= tolerance:
                    return False
            return any(weights)

        if self.declared.reduction == "sum" and are_means([len(part) for part in self._parts]):
            return "means"
        if self.declared.reduction == "mean" and all(
            abs(sum(losses[place,] for place in subset) - loss) <= tolerance for subset, loss in losses.items()
        ):
            return "sums"
        return "averages" if are_means(_weights_of_mean(losses, len(places))) else "couples"

    def _error(self, why: str, whole: Tensor, expected: Tensor) -> SpeedswapError:
        first = len(self._parts[0])
        rest = sum(map(len, self._parts)) - first
        if whole.dim():
            seen = f"the losses of {first + rest} samples together differ from those in parts of {first} and {rest}"
        else:
            seen = (
                f"{first + rest} samples have the loss {float(whole):.6g} together, but parts of {first} and {rest} of "
                f"them add up to {float(expected):.6g}, weighed as micro-batches are"
            )
        counted = "samples, such as targets that are not ignored, or class weights"
        verdict, remedy = _MISTAKES[why]
        verdict = verdict.format("what normalizer counts" if self.declared.normalizer is not None else counted)
        remedy = remedy.format('reduction="mean" and ' if self.declared.reduction == "sum" else "")
        error = CoupledLossError if why == "couples" else BatchError
        return error(
            f"loss_fn {name_of(self.loss_fn)} {verdict}: {seen}; {remedy}, or turn this check off with check=False"
        )


# For each kind of mistake, the verdict and the remedy.
_MISTAKES = {
    "couples": (
        "couples the samples of a batch",
        "if it compares them with each other, as contrastive losses do, give encoder and loss to backward_coupled and "
        "declare the loss with speedswap.batching.coupled; if it adds up means over different things, split it into "
        "one call for each; if it adds a term that belongs to no sample, differentiate that apart, once a batch",
    ),
    "sums": (
        "adds up its samples, where a mean was declared",
        'construct the splitter with reduction="sum"',
    ),
    "means": (
        "averages over its samples, where a sum was declared",
        'construct the splitter with reduction="mean"',
    ),
    "averages": (
        "averages over something other than {}",
        "construct the splitter with {}a normalizer that counts it, e.g. normalizer=lambda x, y: (y != -100).sum()",
    ),
}


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite where one is not finite, except where both are not."""
    if found.shape != expected.shape:
        return math.inf
    difference = (found - expected).abs()[found.isfinite()]
    return float(difference.nan_to_num(math.inf).max()) if len(difference) else 0.0


def _weights_of_mean(losses: dict[tuple[int, ...], float], count: int) -> list[float]:
    """Return weights for which the losses of subsets are means of the parts' losses; zeros if none exist.

    For each subset S, the sum over its parts i of w_i (L_i - L_S) is 0: the weights are the singular vector of the
    least singular value. Parts whose loss is not finite count nothing.
    """
    weights = torch.zeros(count, dtype=torch.float64)
    finite = [place for place in range(count) if math.isfinite(losses[place,])]
    rows = [
        [losses[place,] - loss if place in subset else 0.0 for place in finite]
        for subset, loss in losses.items()
        if all(place in finite for place in subset)
    ]
    if finite:
        vector = torch.linalg.svd(torch.tensor(rows, dtype=torch.float64)).Vh[-1]
        vector = vector / vector.sum()
        if bool(vector.isfinite().all()) and float(vector.min()) >= -0.01:
            weights[finite] = vector.clamp(min=0)
    return weights.tolist()


_TF32_EPS = 2.0**-10
_MATMUL_EPS = {"highest": 0.0, "high": _TF32_EPS, "medium": 2.0**-8}

# Values per sample that a loss may be the small difference of. In half precision only one loss per sample: wider
# tensors are mostly activations, whose rounding the loss averages over.
_COLUMNS = 64
_HALF_PRECISION = 1e-4

# Larger values are fillers, such as the -1e9 of a mask, not terms of a loss.
_FILLER = 1e8

_MOST_ELEMENTS = 2**20  # of a tensor searched for telling samples


class Collective(BaseException):
    """A function was about to communicate with other processes, which are not taking part now.

    Not an Exception, so that no ``except Exception`` in the function takes it for its own failure.
    """


class _Precision(Watcher):
    """The precision of a result, judged by every operation, and the memory that operations read.

    An operation that communicates raises :class:`Collective`.

    Args:
        samples: number of samples in a call.

    Attributes:
        eps: machine epsilon of the least precise arithmetic.
        largest: the largest magnitude of a value that a loss may be a small difference of.
        depends_on_batch: whether results depend on the rest of the batch by design: on its statistics, or on scales
            taken from it.
        watched: addresses of tensors' memory.
        read: those of them that an operation was given.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.eps = 0.0
        self.largest = 1.0
        self.depends_on_batch = False
        self.watched: set[int] = set()
        self.read: set[int] = set()

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        kinds = map(type, tensors_of((args, kwargs)))
        if "c10d" in func.namespace or any(kind.__module__.startswith("torch.distributed") for kind in kinds):
            raise Collective
        self.read |= self.watched & storages((args, kwargs)).keys()
        name = func.name()
        if "quantize" in name or ("batch_norm" in name and _uses_batch(func, args, kwargs)):
            self.depends_on_batch = True

    def made(self, func: Any, result: Any) -> None:
        for tensor in tensors_of(result):
            self._note(func.name(), tensor)

    def _note(self, name: str, tensor: Tensor) -> None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return
        if tensor.dtype.itemsize == 1:
            self.depends_on_batch = True  # 8-bit floats are scaled by the largest value in the batch
            return
        eps = torch.finfo(tensor.dtype).eps
        self.eps = max(self.eps, eps, _eps_inside(name, tensor))
        few = self._samples * (1 if eps > _HALF_PRECISION else _COLUMNS)
        if 0 < tensor.numel() <= few and tensor.layout == torch.strided:
            size = float(tensor.detach().abs().max())
            if size < _FILLER:
                self.largest = max(self.largest, size)


def _uses_batch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a normalization's statistics are those of the batch.

    InstanceNorm arrives as one sample with more channels.
    """
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    training = given.get("training", given.get("train", "no_update" not in func.name()))
    return bool(training) and any(isinstance(one, Tensor) and one.dim() > 1 and len(one) > 1 for one in args[:1])


def _eps_inside(name: str, tensor: Tensor) -> float:
    """Return the machine epsilon of the arithmetic inside an operation, where that is less precise than its result."""
    if tensor.dtype != torch.float32:
        return 0.0
    if "conv" in name and tensor.is_cuda:
        return _TF32_EPS  # cuDNN's default
    if "mm" in name or "conv" in name or "linear" in name:
        try:
            return _MATMUL_EPS[torch.get_float32_matmul_precision()]
        except RuntimeError:  # set through torch's newer interface, which this one does not see
            return _MATMUL_EPS["medium"]
    return 0.0


def few_samples(batch: Batch, count: int) -> list[int]:
    """Choose samples that differ in what a loss may average over.

    In the tensor that looks most like ignored targets, a mask, or targets, in this order, the samples with the least
    mean come first and those with the greatest last; so samples whose targets are ignored are included, and separate
    from the others.

    Returns:
        Distinct indices, as many as requested; spread over the batch if no tensor holds integers.

    >>> few_samples(Batch((torch.randn(6, 2), torch.tensor([3, 1, -100, 2, 2, 0]))), 4)
    [2, 5, 4, 0]
    """
    found, best = None, 0
    for column in batch.columns():
        tensor = _as_tensor(column)
        rank = 0 if tensor is None else _rank(tensor)
        if rank and rank >= best:  # ties go to the last: targets come after inputs
            found, best = tensor, rank
    if found is None:
        return [index * batch.size // count for index in range(count)]
    means = found.reshape(batch.size, -1).double().mean(1)
    order = means.argsort(stable=True).tolist()
    least = count // 2
    return [*order[:least], *order[batch.size - (count - least) :]]


def _as_tensor(column: Any) -> Tensor | None:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        column = torch.from_numpy(column)
    if not isinstance(column, Tensor) or column.layout != torch.strided or column.is_complex():
        return None
    return column.detach() if 0 < column.numel() <= _MOST_ELEMENTS else None


def _rank(tensor: Tensor) -> int:
    """Rank a tensor by how likely it decides which samples count; 0 for none."""
    if tensor.dtype == torch.bool:
        return 2
    if tensor.is_floating_point():
        is_mask = bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())
        return 2 if is_mask else 0
    return 3 if bool((tensor < 0).any()) else 1

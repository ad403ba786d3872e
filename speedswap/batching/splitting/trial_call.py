"""Calls of a loss function on a few telling samples that leave no trace, and the certainty of their results."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap.batching.nested import Batch, tensors_of
from speedswap.batching.recovery import ModuleBuffers, RandomState, storages

__all__ = ["Collective", "Observed", "few_samples", "no_trace"]

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

    Not an Exception, so that no ``except Exception`` in the function takes it for a failure of its own.
    """


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The certainty of a result, from every operation that torch runs inside.

    Args:
        samples: number of samples in a call.
        random: the state of random numbers, which has to stay as it is.
        buffers: likewise.

    Attributes:
        eps: machine epsilon of the least precise arithmetic.
        largest: the largest magnitude of a value that a loss may be a small difference of.
        watched: addresses of tensors' memory.
        read: those of them that an operation was given.
        by_design: whether results depend on the rest of the batch: through batch statistics, or scales taken from it.
    """

    def __init__(self, samples: int, random: RandomState, buffers: ModuleBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._random = random
        self._buffers = buffers
        self._generators: dict[torch.Generator, Tensor] = {}
        self.eps = 0.0
        self.largest = 1.0
        self.by_design = False
        self.watched: set[int] = set()
        self.read: set[int] = set()

    @property
    def is_certain(self) -> bool:
        """True if the same samples give the same result again, in any company."""
        still = not self._generators and RandomState() == self._random and not self._buffers.have_changed()
        return still and not self.by_design

    def restore(self) -> None:
        """Restore the generators that were used by name."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace or any(kind.__module__.startswith("torch.distributed") for kind in types):
            raise Collective
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators[value] = value.get_state()
        self.read |= self.watched & storages((args, kwargs)).keys()
        name = func.name()
        if "quantize" in name or ("batch_norm" in name and _uses_batch(func, args, kwargs)):
            self.by_design = True
        result = func(*args, **kwargs)
        for tensor in tensors_of(result):
            self._note(name, tensor)
        return result

    def _note(self, name: str, tensor: Tensor) -> None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return
        if tensor.dtype.itemsize == 1:
            self.by_design = True  # 8-bit floats are scaled by the largest value in the batch
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


@contextmanager
def no_trace(modules: Sequence[nn.Module], samples: int) -> Iterator[Observed]:
    """Surround calls that leave random numbers, buffers and caches as they were; no graph is kept.

    Args:
        modules: those whose buffers are copied at once; the buffers of others are copied just before they run.
        samples: number of samples in a call.
    """
    random, buffers = RandomState(), ModuleBuffers()
    for module in modules:
        for part in module.modules():
            buffers.note(part)
    observed = Observed(samples, random, buffers)
    hook = register_module_forward_pre_hook(lambda module, args: buffers.note(module))
    try:
        with torch.no_grad(), _not_compiled(), warnings.catch_warnings(), observed:
            warnings.simplefilter("ignore")  # about so few samples
            yield observed
    finally:
        hook.remove()
        observed.restore()
        buffers.restore()
        random.restore()
        torch.clear_autocast_cache()  # of weights that were cast without a graph


def _not_compiled() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled, rather than compile them again for sizes that do not recur."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: Callable[..., AbstractContextManager[Any]] = torch.compiler.set_stance
    return stance("force_eager")


def few_samples(batch: Batch, count: int) -> list[int]:
    """Choose samples that differ in what a loss may average over.

    In the tensor that looks most like ignored targets, a mask, or targets, in this order, the samples with the least
    mean come first and those with the greatest last; so samples whose targets are ignored are among them, and separate
    from others.

    Returns:
        Different indices, as many as asked for; spread over the batch where no tensor holds integers.

    >>> few_samples(Batch((torch.randn(6, 2), torch.tensor([3, 1, -100, 2, 2, 0]))), 4)
    [2, 5, 4, 0]
    """
    found, best = None, 0
    for column in batch.columns():
        tensor = _as_tensor(column)
        rank = 0 if tensor is None else _rank(tensor)
        if rank and rank >= best:  # of equals the last: targets come after inputs
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

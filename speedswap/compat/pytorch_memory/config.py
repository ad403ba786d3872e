"""The numbers of samples that fit in host memory and on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedswap.batching import estimate_memory
from speedswap.batching.nested import tensors_of
from speedswap.compat.pytorch_memory.networks import built, get_parameter_count, layers_of, zeros_for
from speedswap.errors import BatchError, MemoryBudgetError

__all__ = ["Config", "GiB", "KiB", "MiB", "NotEnoughGPURam", "i_arr_mul", "round_to"]

_TRIAL_BYTES = 1 << 26  # a pass of this size is enough for layers that treat each sample by itself


def KiB(coef: float = 1) -> int:
    """Return the bytes of ``coef`` KiB.

    >>> KiB(1.5), MiB(), GiB(2)
    (1536, 1048576, 2147483648)
    """
    return math.floor(coef * 1024)


def MiB(coef: float = 1) -> int:
    """Return the bytes of ``coef`` MiB."""
    return math.floor(coef * 1024**2)


def GiB(coef: float = 1) -> int:
    """Return the bytes of ``coef`` GiB."""
    return math.floor(coef * 1024**3)


def round_to(number: int, modulo: int) -> int:
    """Return the largest multiple of ``modulo`` that is not above ``number``.

    >>> round_to(17, 5)
    15
    """
    return number - number % modulo


def i_arr_mul(array: Iterable[int]) -> int:
    """Return the product of integers.

    >>> i_arr_mul((3, 4, 5))
    60
    """
    return math.prod(array)


class NotEnoughGPURam(MemoryBudgetError):
    """``gpu_memory_limit`` is too small for the model, or for the samples of one read."""


class Config:
    """The numbers of samples that fit in host memory at once, and in a batch on the device.

    Args:
        cpu_memory_limit: bytes of host memory for samples.
        gpu_memory_limit: bytes for training, the model included.
        input_shape: of one sample.
        output_shape: of one target.
        model_class: a function or class that makes the model without arguments; or the model itself.
        total_sample_count: identities in an epoch.
        input_dtype: of the samples: NumPy's, torch's, or a name.
        output_dtype: of the targets.
        one_read_count: samples per read.
        preferred_batch_size: taken if it fits, rounded down to a multiple of ``one_read_count``.
        optimizer: its state counts too, see :func:`speedswap.batching.estimate_memory`.

    Raises:
        NotEnoughGPURam: the model, or the samples of one read, do not fit in ``gpu_memory_limit``.
        MemoryBudgetError: the samples of one read do not fit in ``cpu_memory_limit``.

    >>> from speedswap.compat.pytorch_memory import KiB, MiB
    >>> config = Config(KiB(1), MiB(1), (8,), (1,), lambda: nn.Linear(8, 1), 100, np.float32, np.float32, 2, 7)
    >>> config.sample_size, config.batch_size, config.allowed_sample_count
    (36, 6, 12)
    """

    def __init__(
        self,
        cpu_memory_limit: int,
        gpu_memory_limit: int,
        input_shape: Sequence[int],
        output_shape: Sequence[int],
        model_class: Callable[[], nn.Module] | nn.Module,
        total_sample_count: int,
        input_dtype: Any = np.float64,
        output_dtype: Any = np.float64,
        one_read_count: int = 1,
        preferred_batch_size: int | None = None,
        *,
        optimizer: Any = None,
    ) -> None:
        for name, value in (("total_sample_count", total_sample_count), ("one_read_count", one_read_count)):
            if value < 1:
                raise BatchError(f"{name} is {value}; it must be at least 1")
        self.cpu_memory_limit = cpu_memory_limit
        self.gpu_memory_limit = gpu_memory_limit
        self.input_shape = tuple(input_shape)
        self.output_shape = tuple(output_shape)
        self.total_sample_count = total_sample_count
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.one_read_count = one_read_count
        self.input_item_size = _torch_dtype(input_dtype).itemsize
        self.output_item_size = _torch_dtype(output_dtype).itemsize
        read_bytes = self.sample_size * one_read_count
        if read_bytes > cpu_memory_limit:
            raise MemoryBudgetError(
                f"cpu_memory_limit is {cpu_memory_limit}, but the samples of one read take {read_bytes}; give more"
            )
        network = built(model_class)
        self.parameter_count = get_parameter_count(network)
        self.model_memory_usage = sum(parameter.nbytes for parameter in network.parameters())
        if self.model_memory_usage >= gpu_memory_limit:
            raise NotEnoughGPURam(
                f"gpu_memory_limit is {gpu_memory_limit}, but the model's parameters alone take "
                f"{self.model_memory_usage}; give more, or make the model smaller"
            )
        layers = layers_of(network, input_shape)
        self.total_intermediate_variable_count = layers.variable_count
        self._capacity = self._most_samples(network, layers.batch_shape, optimizer)
        self.preferred_batch_size = preferred_batch_size or self._capacity

    def _most_samples(self, network: nn.Module, batch_shape: tuple[int, ...], optimizer: Any) -> int:
        """Return the number of samples that fits on the device, by trial."""
        like = zeros_for(network, (0, *batch_shape[1:]))
        inputs = torch.zeros((1, *batch_shape[1:]), dtype=_torch_dtype(self.input_dtype), device=like.device)
        targets = torch.zeros((1, *self.output_shape), dtype=_torch_dtype(self.output_dtype), device=like.device)

        def loss_fn(given: Tensor, _: Tensor) -> Tensor:
            outputs = [one for one in tensors_of(network(given.to(like.dtype))) if one.requires_grad]
            return sum((one.square().mean() for one in outputs), torch.zeros((), device=like.device))

        estimate = estimate_memory(
            network, (inputs, targets), optimizer, loss_fn=loss_fn, accumulate=False, trial_bytes=_TRIAL_BYTES
        )
        needed = estimate.total(self.one_read_count)
        if needed > self.gpu_memory_limit:
            raise NotEnoughGPURam(
                f"gpu_memory_limit is {self.gpu_memory_limit}, but training with the {self.one_read_count} samples of "
                f"one read takes {needed}; give more, or make the model or one_read_count smaller"
            )
        return estimate.largest_micro_batch_size(self.gpu_memory_limit)

    @property
    def input_size(self) -> int:
        """Bytes of a sample's input."""
        return self.input_item_size * i_arr_mul(self.input_shape)

    @property
    def output_size(self) -> int:
        """Bytes of a sample's target."""
        return self.output_item_size * i_arr_mul(self.output_shape)

    @property
    def sample_size(self) -> int:
        """Bytes of a sample with its target."""
        return self.input_size + self.output_size

    @property
    def single_sample_memory_usage(self) -> int:
        """Bytes of a sample and of all modules' outputs for it, with their gradients, in the input's precision."""
        return self.sample_size + self.total_intermediate_variable_count * self.input_item_size

    @property
    def batch_size(self) -> int:
        """Samples in a batch, a multiple of ``one_read_count``."""
        fits = min(self._capacity, self.preferred_batch_size, self._allowed_sample_count * self.one_read_count)
        return round_to(max(fits, self.one_read_count), self.one_read_count)

    @property
    def sample_count_in_single_batch(self) -> int:
        """Identities in a batch."""
        return self.batch_size // self.one_read_count

    @property
    def sample_batch_memory_footprint(self) -> int:
        """Bytes of a batch with its targets."""
        return self.batch_size * self.sample_size

    @property
    def _allowed_sample_count(self) -> int:
        return min(self.total_sample_count, self.cpu_memory_limit // (self.sample_size * self.one_read_count))

    @property
    def allowed_sample_count(self) -> int:
        """Identities whose samples fit in host memory, in whole batches."""
        return round_to(self._allowed_sample_count, self.sample_count_in_single_batch)

    @property
    def batch_count(self) -> int:
        """Full batches in an epoch."""
        return self.total_sample_count // self.sample_count_in_single_batch

    @property
    def total_read_count(self) -> int:
        """Fillings of host memory per epoch."""
        return -(-self.total_sample_count // self.allowed_sample_count)

    @property
    def batch_count_in_memory(self) -> int:
        """Batches that host memory holds."""
        return self.allowed_sample_count // self.sample_count_in_single_batch


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for any spelling of one."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype):
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return torch.from_numpy(np.empty(0, dtype)).dtype

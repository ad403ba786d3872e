"""The names of "Pytorch Utilities" (pytorch-memory) over :func:`speedswap.estimate_memory` and :func:`speedswap.feed`.

What is different, since it did not work there:

* Every epoch reads its samples again, and nothing of an epoch is kept: memory stays within the limit.
* The batch size fits ``gpu_memory_limit`` with the parameters' gradients, what the functions between layers keep and,
  where ``optimizer`` is given, its state; a limit below one read raises :class:`NotEnoughGPURam`, and a
  ``cpu_memory_limit`` below one read :class:`~speedswap.errors.MemoryBudgetError`.
* Parameters count once, those at the root too; dtypes may be NumPy's or torch's in any spelling; layers may return
  tuples, and BatchNorm works; random numbers are as before.
* ``model_class`` may also be a module. Shapes are those of a sample; one that begins with a batch dimension of 1 works
  where the model would not take another dimension.
* Lists of different lengths are refused. :class:`Feeder` does drop the samples that do not fill a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedswap.batching.estimating.estimate import estimate_memory
from speedswap.batching.feeding.feed import Feed, feed
from speedswap.batching.nested import tensors_of
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError, MemoryBudgetError

__all__ = [
    "Config",
    "Feeder",
    "GiB",
    "InspectNetwork",
    "KiB",
    "MiB",
    "NotEnoughGPURam",
    "generate_epoch",
    "get_parameter_count",
    "get_variable_count",
    "i_arr_mul",
    "multiply_epochs",
    "round_to",
    "summary_of_network",
]


class NotEnoughGPURam(MemoryBudgetError):
    """``gpu_memory_limit`` is too small for the model, or for the samples of one read."""


# ---------------------------------------------------------------------- numbers


def KiB(coef: float = 1) -> int:
    """Bytes of so many KiB.

    >>> KiB(1.5), MiB(), GiB(2)
    (1536, 1048576, 2147483648)
    """
    return math.floor(coef * 1024)


def MiB(coef: float = 1) -> int:
    """Bytes of so many MiB."""
    return math.floor(coef * 1024**2)


def GiB(coef: float = 1) -> int:
    """Bytes of so many GiB."""
    return math.floor(coef * 1024**3)


def round_to(number: int, modulo: int) -> int:
    """The largest multiple of ``modulo`` that is not above ``number``.

    >>> round_to(17, 5)
    15
    """
    return number - number % modulo


def i_arr_mul(array: Iterable[int]) -> int:
    """The product of integers.

    >>> i_arr_mul((3, 4, 5))
    60
    """
    return math.prod(array)


# ---------------------------------------------------------------------- networks


def get_variable_count(model_class: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]) -> int:
    """Elements of the outputs of all modules for one sample, twice where they get a gradient."""
    network, count = _built(model_class), 0

    def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
        nonlocal count
        count += sum(one.numel() * (2 if one.requires_grad else 1) for one in tensors_of(outputs))

    samples = _run_with_hook(network, input_shape, add)
    return count // samples


def get_parameter_count(model_class: Callable[[], nn.Module] | nn.Module) -> int:
    """Elements of all parameters, each once."""
    return sum(parameter.numel() for parameter in _built(model_class).parameters())


def summary_of_network(
    model_class: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]
) -> list[dict[str, Any]]:
    """For each module, in the order in which they finish, what one sample is to it.

    Returns:
        Dictionaries of ``input_shape``, ``output_shape`` (of the first tensor each), ``parameter_count`` and
        ``layer_type_name``.

    >>> summary_of_network(nn.Sequential(nn.Linear(3, 2)), (3,))[0]
    {'input_shape': (3,), 'output_shape': (2,), 'parameter_count': 8, 'layer_type_name': 'Linear'}
    """
    network = _built(model_class)
    layers: list[tuple[nn.Module, tuple[int, ...], tuple[int, ...]]] = []

    def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
        shapes = [tuple(next(tensors_of(value), torch.empty(0)).shape) for value in (inputs, outputs)]
        layers.append((module, shapes[0], shapes[1]))

    samples = _run_with_hook(network, input_shape, add)
    first = 0 if samples == 1 else 1
    return [
        {
            "input_shape": inputs[first:],
            "output_shape": outputs[first:],
            "parameter_count": get_parameter_count(module),
            "layer_type_name": type(module).__name__,
        }
        for module, inputs, outputs in layers
    ]


class InspectNetwork:
    """The two counts as methods, as in older versions."""

    def __init__(self, network: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]) -> None:
        self.network = network
        self.input_shape = input_shape

    def get_parameter_count(self) -> int:
        """See :func:`get_parameter_count`."""
        return get_parameter_count(self.network)

    def get_intermediate_variable_count(self) -> int:
        """See :func:`get_variable_count`."""
        return get_variable_count(self.network, self.input_shape)


def _built(model_class: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(model_class, nn.Module):
        return model_class
    with _same_random_numbers():
        return model_class()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    random = RandomState()
    try:
        yield
    finally:
        random.restore()


def _run_with_hook(network: nn.Module, input_shape: Sequence[int], hook: Callable[..., None]) -> int:
    """Run a network once, with a hook on all its modules; returns how many samples it got."""
    shape = _batch_shape(network, input_shape)
    handles = [module.register_forward_hook(hook) for module in network.modules()]
    try:
        _run(network, shape)
    finally:
        for handle in handles:
            handle.remove()
    return shape[0]


def _batch_shape(network: nn.Module, input_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a batch of two samples; of one, where ``input_shape`` has the batch dimension already."""
    try:
        _run(network, (2, *input_shape))
    except (RuntimeError, ValueError, TypeError, IndexError):
        if len(input_shape) < 2 or input_shape[0] != 1:
            raise
        _run(network, tuple(input_shape))
        return tuple(input_shape)
    return (2, *input_shape)


def _run(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Forward, on zeros, in evaluation mode; every module's mode is put back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with _same_random_numbers(), torch.enable_grad():
            network(_zeros_for(network, shape))
    finally:
        for module, training in modes.items():
            module.training = training


def _zeros_for(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """What the network's first layer takes: indices where it is an embedding."""
    first = next((module for module in network.modules() if not list(module.children())), network)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return torch.zeros(shape, dtype=torch.long, device=first.weight.device)
    parameter = next(network.parameters(), torch.empty(0))
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


# ---------------------------------------------------------------------- sizes


class Config:
    """How many samples fit in host memory at once, and how many in a batch on the device.

    Args:
        cpu_memory_limit: bytes of host memory for samples.
        gpu_memory_limit: bytes for training, the model included.
        input_shape: of one sample.
        output_shape: of one target.
        model_class: makes the model without arguments; or the model itself.
        total_sample_count: identities in an epoch.
        input_dtype: of the samples: NumPy's, torch's, or a name.
        output_dtype: of the targets.
        one_read_count: samples that one read gives.
        preferred_batch_size: is taken if it fits, rounded down to a multiple of ``one_read_count``.
        optimizer: counts with its state, see :func:`speedswap.estimate_memory`.

    Raises:
        NotEnoughGPURam: the model, or the samples of one read, do not fit in ``gpu_memory_limit``.
        MemoryBudgetError: the samples of one read do not fit in ``cpu_memory_limit``.

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
                f"cpu_memory_limit is {cpu_memory_limit}, but what one read gives takes {read_bytes}; give more"
            )
        network = _built(model_class)
        self.parameter_count = get_parameter_count(network)
        self.model_memory_usage = sum(parameter.nbytes for parameter in network.parameters())
        if self.model_memory_usage >= gpu_memory_limit:
            raise NotEnoughGPURam(
                f"gpu_memory_limit is {gpu_memory_limit}, but the model's parameters alone take "
                f"{self.model_memory_usage}; give more, or make the model smaller"
            )
        self.total_intermediate_variable_count = get_variable_count(network, input_shape)
        self._capacity = self._most_samples(network, optimizer)
        self.preferred_batch_size = preferred_batch_size or self._capacity

    def _most_samples(self, network: nn.Module, optimizer: Any) -> int:
        """What fits on the device, by trial."""
        shape = (1, *_batch_shape(network, self.input_shape)[1:])
        parameter = next(network.parameters(), torch.empty(0))
        zeros = _zeros_for(network, shape)
        inputs = torch.zeros(shape, dtype=_torch_dtype(self.input_dtype), device=parameter.device)
        targets = torch.zeros((1, *self.output_shape), dtype=_torch_dtype(self.output_dtype), device=parameter.device)

        def loss_fn(given: Tensor, _: Tensor) -> Tensor:
            outputs = [one for one in tensors_of(network(given.to(zeros.dtype))) if one.requires_grad]
            return sum((one.square().mean() for one in outputs), torch.zeros((), device=parameter.device))

        estimate = estimate_memory(network, (inputs, targets), optimizer, loss_fn=loss_fn, accumulate=False)
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
        """How often host memory would have to be filled for an epoch."""
        return -(-self.total_sample_count // self.allowed_sample_count)

    @property
    def batch_count_in_memory(self) -> int:
        """Batches that host memory holds."""
        return self.allowed_sample_count // self.sample_count_in_single_batch


def _torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype for any spelling of one."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype):
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return torch.from_numpy(np.empty(0, dtype)).dtype


# ---------------------------------------------------------------------- epochs

Reader = Callable[[Any], Iterable[Any]]
Apply = Callable[[Iterable[Any]], Any]


def _feed(
    configs: Config,
    input_list: Sequence[Any],
    output_list: Sequence[Any],
    read_input: Reader,
    get_output: Reader,
    apply_on_input_batch: Apply | None,
    apply_on_output_batch: Apply | None,
    *,
    drop_last: bool,
    shuffle: bool,
) -> Feed[Any]:
    if len(input_list) != len(output_list):
        raise BatchError(f"output_list has {len(output_list)} items, but input_list has {len(input_list)}")
    apply_input = apply_on_input_batch or _stacked
    apply_output = apply_on_output_batch or _stacked

    def apply(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        return apply_input(one for one, _ in samples), apply_output(one for _, one in samples)

    own = apply_on_input_batch is not None or apply_on_output_batch is not None
    batch_bytes = configs.sample_batch_memory_footprint
    least = (2 * batch_bytes if own else batch_bytes) + configs.one_read_count * configs.sample_size
    return feed(
        input_list[: configs.total_sample_count],
        read_input if apply_on_input_batch else _converting(read_input, configs.input_dtype),
        configs.batch_size,
        budget_bytes=max(configs.cpu_memory_limit, least),
        epochs=None,
        targets=output_list[: configs.total_sample_count],
        read_target=get_output if apply_on_output_batch else _converting(get_output, configs.output_dtype),
        variants=configs.one_read_count,
        shuffle=shuffle,
        drop_last=drop_last,
        collate=apply if own else None,
    )


def _converting(read: Reader, dtype: Any) -> Reader:
    """A reader of arrays, or of tensors where the dtype is torch's."""

    def convert(identity: Any) -> Iterator[Any]:
        for sample in read(identity):
            yield torch.as_tensor(sample, dtype=dtype) if isinstance(dtype, torch.dtype) else np.asarray(sample, dtype)

    return convert


def _stacked(samples: Iterable[Any]) -> Any:
    given = list(samples)
    return torch.stack(given) if isinstance(given[0], Tensor) else np.stack(given)


class Feeder:
    """Epochs of pairs of batches, from lists of what their samples are called.

    Args:
        configs: sizes and limits.
        input_list: identities of the inputs.
        output_list: identities of the targets, as many.
        read_input: returns an iterable of ``one_read_count`` samples for an identity.
        get_output: the same for targets.
        apply_on_input_batch: makes a batch of an iterable of samples; an array of ``input_dtype`` by default.
        apply_on_output_batch: the same for targets.
        shuffle: give each epoch an order of its own.

    Raises:
        BatchError: the lists differ in length.
    """

    def __init__(
        self,
        configs: Config,
        input_list: Sequence[Any],
        output_list: Sequence[Any],
        read_input: Reader,
        get_output: Reader,
        apply_on_input_batch: Apply | None = None,
        apply_on_output_batch: Apply | None = None,
        *,
        shuffle: bool = False,
    ) -> None:
        self.configs = configs
        lists = (input_list, output_list, read_input, get_output, apply_on_input_batch, apply_on_output_batch)
        self._feed = _feed(configs, *lists, drop_last=True, shuffle=shuffle)

    def generate_epochs(self, epoch_count: int = 1) -> Iterator[Iterator[tuple[Any, Any]]]:
        """So many epochs; each reads all samples again, and leaves out those that do not fill a batch."""
        for index in range(epoch_count):
            yield self._feed.epoch(index)


class _Epoch:
    """An epoch that can be had any number of times; every time it is read again."""

    def __init__(self, source: Feed[Any]) -> None:
        self._source = source
        self._count = 0
        self._current: Iterator[tuple[Any, Any]] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._count += 1
        return self._source.epoch(self._count - 1)

    def __next__(self) -> tuple[Any, Any]:
        if self._current is None:
            self._current = iter(self)
        return next(self._current)


def generate_epoch(
    configs: Config,
    input_list: Sequence[Any],
    output_list: Sequence[Any],
    read_input: Reader,
    get_output: Reader,
    apply_on_input_batch: Apply | None = None,
    apply_on_output_batch: Apply | None = None,
    *,
    shuffle: bool = False,
) -> _Epoch:
    """One epoch, with the arguments of :class:`Feeder`; the last batch may be smaller than the others."""
    lists = (input_list, output_list, read_input, get_output, apply_on_input_batch, apply_on_output_batch)
    return _Epoch(_feed(configs, *lists, drop_last=False, shuffle=shuffle))


def multiply_epochs(epoch_generator: Iterable[Any], epoch_count: int = 2) -> Iterator[Iterator[Any]]:
    """An epoch so many times, read again each time.

    Args:
        epoch_generator: of :func:`generate_epoch`, or anything else that can be iterated over more than once.
        epoch_count: how often.

    Raises:
        BatchError: it is a generator or another iterator, which can be iterated over only once.
    """
    if epoch_count > 1 and not isinstance(epoch_generator, _Epoch) and iter(epoch_generator) is epoch_generator:
        raise BatchError(
            f"epoch_generator is a {type(epoch_generator).__name__}, which gives its batches once; to give them "
            "again they would all have to be kept: pass what generate_epoch returns, or a list"
        )
    for _ in range(epoch_count):
        yield iter(epoch_generator)

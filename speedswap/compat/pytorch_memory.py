"""The names of "Pytorch Utilities" (pytorch-memory) over speedswap's memory estimates and feed.

Differences, where the predecessor did not work:

* Every epoch reads its samples again, and nothing of an epoch is kept: memory stays within the limit.
* The batch size, found by training with two samples and with a few more, fits ``gpu_memory_limit`` with the parameters'
  gradients, the tensors that functions between layers keep and, with ``optimizer``, its state; a limit below one read
  raises :class:`NotEnoughGPURam`, and a ``cpu_memory_limit`` below one read
  :class:`~speedswap.errors.MemoryBudgetError`.
* Parameters count once, those at the root too; dtypes may be NumPy's or torch's in any spelling; layers may return
  tuples, and BatchNorm works; random numbers are unchanged.
* ``model_class`` may also be a module. Shapes are those of a sample; one that begins with a batch dimension of 1 works
  if the model does not take another dimension.
* Lists of different lengths are refused. :class:`Feeder` does drop the samples that do not fill a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.batching import estimate_memory, feed
from speedswap.batching.nested import tensors_of
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError, MemoryBudgetError
from speedswap.monitor.parameters import modes_kept
from speedswap.swapping.switchers.arrays import as_dtype


class _Layer(NamedTuple):
    """A module that has run: the shapes of its first input and output, and its outputs' elements with gradients."""

    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    variables: int


def get_variable_count(model_class: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]) -> int:
    """Count the elements of all modules' outputs for one sample, twice if they get a gradient."""
    return _variables(*_run(_built(model_class), input_shape))


def get_parameter_count(model_class: Callable[[], nn.Module] | nn.Module) -> int:
    """Count the elements of all parameters, each once."""
    return sum(parameter.numel() for parameter in _built(model_class).parameters())


def summary_of_network(
    model_class: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]
) -> list[dict[str, Any]]:
    """Describe each module's work on one sample, in the order in which the modules finish.

    Returns:
        Dictionaries with ``input_shape``, ``output_shape`` (of the first tensor each), ``parameter_count`` and
        ``layer_type_name``.

    >>> summary_of_network(nn.Sequential(nn.Linear(3, 2)), (3,))[0]
    {'input_shape': (3,), 'output_shape': (2,), 'parameter_count': 8, 'layer_type_name': 'Linear'}
    """
    (samples, *_), layers = _run(_built(model_class), input_shape)
    first = 0 if samples == 1 else 1
    return [
        {
            "input_shape": layer.input_shape[first:],
            "output_shape": layer.output_shape[first:],
            "parameter_count": get_parameter_count(layer.module),
            "layer_type_name": type(layer.module).__name__,
        }
        for layer in layers
    ]


class InspectNetwork:
    """The two counts as methods, as in older versions."""

    def __init__(self, network: Callable[[], nn.Module] | nn.Module, input_shape: Sequence[int]) -> None:
        self.network = network
        self.input_shape = input_shape

    def get_parameter_count(self) -> int:
        """Call :func:`get_parameter_count`."""
        return get_parameter_count(self.network)

    def get_intermediate_variable_count(self) -> int:
        """Call :func:`get_variable_count`."""
        return get_variable_count(self.network, self.input_shape)


def _built(model_class: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """Return the network, which is made if need be, without changing the state of random numbers."""
    if isinstance(model_class, nn.Module):
        return model_class
    with RandomState():
        return model_class()


def _variables(batch_shape: tuple[int, ...], layers: list[_Layer]) -> int:
    return sum(layer.variables for layer in layers) // batch_shape[0]


def _run(network: nn.Module, input_shape: Sequence[int]) -> tuple[tuple[int, ...], list[_Layer]]:
    """Run a network's forward pass once, on zeros, in evaluation mode, and restore every module's mode.

    Returns:
        The batch's shape, of two samples; or of one, if ``input_shape`` has the batch dimension already and the network
        does not take another. The modules, in the order in which they finished.
    """
    layers: list[_Layer] = []

    def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
        taken, given = (tuple(next(tensors_of(value), torch.empty(0)).shape) for value in (inputs, outputs))
        variables = sum(one.numel() * (2 if one.requires_grad else 1) for one in tensors_of(outputs))
        layers.append(_Layer(module, taken, given, variables))

    shape = (2, *input_shape)
    handles = [module.register_forward_hook(add) for module in network.modules()]
    try:
        with RandomState(), torch.enable_grad(), modes_kept([network]):
            network.eval()
            try:
                network(_zeros_for(network, shape))
            except (RuntimeError, ValueError, TypeError, IndexError):
                if len(input_shape) < 2 or input_shape[0] != 1:
                    raise
                layers.clear()
                shape = tuple(input_shape)
                network(_zeros_for(network, shape))
    finally:
        for handle in handles:
            handle.remove()
    return shape, layers


def _zeros_for(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return zeros for the network's first layer: indices for an embedding."""
    first = next((module for module in network.modules() if not list(module.children())), network)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return torch.zeros(shape, dtype=torch.long, device=first.weight.device)
    parameter = next(network.parameters(), torch.empty(0))
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


_TRIAL_BYTES = 1 << 26  # a pass of this size is enough for layers that treat samples independently


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
        self.input_item_size = as_dtype(input_dtype).itemsize
        self.output_item_size = as_dtype(output_dtype).itemsize
        read_bytes = self.sample_size * one_read_count
        if read_bytes > cpu_memory_limit:
            raise MemoryBudgetError(
                f"cpu_memory_limit is {cpu_memory_limit}, but the samples of one read take {read_bytes}; give more"
            )
        network = _built(model_class)
        self.parameter_count = get_parameter_count(network)
        self.model_memory_usage = sum(parameter.nbytes for parameter in network.parameters())
        if self.model_memory_usage >= gpu_memory_limit:
            raise NotEnoughGPURam(
                f"gpu_memory_limit is {gpu_memory_limit}, but the model's parameters alone take "
                f"{self.model_memory_usage}; give more, or make the model smaller"
            )
        batch_shape, layers = _run(network, input_shape)
        self.total_intermediate_variable_count = _variables(batch_shape, layers)
        self._capacity = self._most_samples(network, batch_shape, optimizer)
        self.preferred_batch_size = preferred_batch_size or self._capacity

    def _most_samples(self, network: nn.Module, batch_shape: tuple[int, ...], optimizer: Any) -> int:
        """Return the number of samples that fits on the device, by trial."""
        like = _zeros_for(network, (0, *batch_shape[1:]))
        inputs = torch.zeros((1, *batch_shape[1:]), dtype=as_dtype(self.input_dtype), device=like.device)
        targets = torch.zeros((1, *self.output_shape), dtype=as_dtype(self.output_dtype), device=like.device)

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


Item = TypeVar("Item")

Sample = np.ndarray | Tensor
MemorySamples = Iterable[Sample]
Batch = Iterable[Sample]
Epoch = Iterable[tuple[Batch, Batch]]

Reader = Callable[[Any], Iterable[Any]]
Apply = Callable[[Iterable[Any]], Any]


def _counted(name: str, read: Reader, wanted: int, dtype: Any) -> Reader:
    """Wrap a reader to require a number of samples, and convert them to NumPy's or torch's ``dtype`` if given."""

    def samples_of(identity: Any) -> Iterator[Any]:
        count = 0
        for count, sample in enumerate(read(identity), 1):
            if count > wanted:
                raise _miscounted(name, identity, f"more than {wanted}", wanted)
            yield sample if dtype is None else _converted(sample, dtype)
        if count < wanted:
            raise _miscounted(name, identity, str(count), wanted)

    return samples_of


def _miscounted(name: str, identity: Any, count: str, wanted: int) -> BatchError:
    return BatchError(
        f"{name}({identity!r}) gave {count} samples, but one_read_count is {wanted}; give the Config the number of "
        "samples per read"
    )


def _converted(sample: Any, dtype: Any) -> Any:
    return torch.as_tensor(sample, dtype=dtype) if isinstance(dtype, torch.dtype) else np.asarray(sample, dtype)


def _stacked(samples: Iterable[Any]) -> Any:
    given = list(samples)
    return torch.stack(given) if isinstance(given[0], Tensor) else np.stack(given)


class Feeder:
    """Epochs of pairs of batches, from lists of their samples' identities.

    Args:
        configs: sizes and limits.
        input_list: identities of the inputs.
        output_list: identities of the targets, in equal number.
        read_input: returns an iterable of ``one_read_count`` samples for an identity.
        get_output: the same for targets.
        apply_on_input_batch: makes a batch of an iterable of samples; an array of ``input_dtype`` by default.
        apply_on_output_batch: the same for targets.
        shuffle: give each epoch a different order.

    Raises:
        BatchError: the lists differ in length.
    """

    _drop_last = True

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
        if len(input_list) != len(output_list):
            raise BatchError(f"output_list has {len(output_list)} items, but input_list has {len(input_list)}")
        apply_input, apply_output = apply_on_input_batch or _stacked, apply_on_output_batch or _stacked

        def apply(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
            return apply_input(one for one, _ in samples), apply_output(one for _, one in samples)

        own = apply_on_input_batch is not None or apply_on_output_batch is not None
        input_dtype = None if apply_on_input_batch else configs.input_dtype
        output_dtype = None if apply_on_output_batch else configs.output_dtype
        reads = configs.one_read_count
        least = configs.sample_batch_memory_footprint * (2 if own else 1) + reads * configs.sample_size
        self.configs = configs
        self._feed = feed(
            input_list[: configs.total_sample_count],
            _counted("read_input", read_input, reads, input_dtype),
            configs.batch_size,
            budget_bytes=max(configs.cpu_memory_limit, least),
            epochs=None,
            targets=output_list[: configs.total_sample_count],
            read_target=_counted("get_output", get_output, reads, output_dtype),
            variants=reads,
            shuffle=shuffle,
            drop_last=self._drop_last,
            collate=apply if own else None,
        )
        self._count = 0

    def generate_epochs(self, epoch_count: int = 1) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yield epochs, each of which reads all samples again and drops the rest that does not fill a batch."""
        for index in range(epoch_count):
            yield self._feed.epoch(index)


class generate_epoch(Feeder):
    """One epoch, with the arguments of :class:`Feeder`; the last batch may be smaller than the others.

    It can be iterated over any number of times, and is read again each time.
    """

    _drop_last = False
    _current: Iterator[tuple[Any, Any]] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._count += 1
        return self._feed.epoch(self._count - 1)

    def __next__(self) -> tuple[Any, Any]:
        if self._current is None:
            self._current = iter(self)
        return next(self._current)


def multiply_epochs(epoch_generator: Iterable[Any], epoch_count: int = 2) -> Iterator[Iterator[Any]]:
    """Yield an epoch several times, read again each time.

    Args:
        epoch_generator: the result of :func:`generate_epoch`, or any object that can be iterated over more than once.
        epoch_count: the number of times.

    Raises:
        BatchError: it is a generator or another iterator, which can be iterated over only once.
    """
    if epoch_count > 1 and not isinstance(epoch_generator, generate_epoch) and iter(epoch_generator) is epoch_generator:
        raise BatchError(
            f"epoch_generator is {a_kind(epoch_generator)}, which yields its batches once; to yield them "
            "again they would all have to be kept: pass the result of generate_epoch, or a list"
        )
    for _ in range(epoch_count):
        yield iter(epoch_generator)


def generator_with_stop_iteration(gen: Iterator[Item]) -> Iterator[Item]:
    """Return all items of an iterator, the first of which is taken now.

    Raises:
        StopIteration: the iterator is empty.

    >>> list(generator_with_stop_iteration(iter("ab")))
    ['a', 'b']
    """
    return itertools.chain([next(gen)], gen)

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
from contextlib import ExitStack
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.batching import estimate_memory, feed
from speedswap.batching.nested import require_integer, tensors_of
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError, MemoryBudgetError
from speedswap.monitor.figures import modes_kept
from speedswap.swapping.switchers.collection import as_dtype

Network = Callable[[], nn.Module] | nn.Module
"""A module, or the class or function that makes it without arguments."""


def get_variable_count(model_class: Network, input_shape: Sequence[int]) -> int:
    """Count the elements of the outputs of all modules in a network for one sample, twice if they get a gradient."""
    return _run(_built(model_class), input_shape)[1]


def get_parameter_count(model_class: Network) -> int:
    """Count the elements of all parameters, each once."""
    return sum(parameter.numel() for parameter in _built(model_class).parameters())


def summary_of_network(model_class: Network, input_shape: Sequence[int]) -> list[dict[str, Any]]:
    """Describe each module's work on one sample, in the order in which the modules finish.

    Returns:
        Dictionaries with ``input_shape``, ``output_shape`` (of the first tensor each), ``parameter_count`` and
        ``layer_type_name``.

    >>> summary_of_network(nn.Sequential(nn.Linear(3, 2)), (3,))[0]
    {'input_shape': (3,), 'output_shape': (2,), 'parameter_count': 8, 'layer_type_name': 'Linear'}
    """
    return _run(_built(model_class), input_shape)[2]


class InspectNetwork:
    """The two counts as methods, as in older versions."""

    def __init__(self, network: Network, input_shape: Sequence[int]) -> None:
        self.network = network
        self.input_shape = input_shape

    def get_parameter_count(self) -> int:
        """Call :func:`get_parameter_count`."""
        return get_parameter_count(self.network)

    def get_intermediate_variable_count(self) -> int:
        """Call :func:`get_variable_count`."""
        return get_variable_count(self.network, self.input_shape)


def _built(model_class: Network) -> nn.Module:
    """Return the network, which is made if need be, without changing the state of random numbers."""
    if isinstance(model_class, nn.Module):
        return model_class
    with RandomState():
        return model_class()


def _run(network: nn.Module, input_shape: Sequence[int]) -> tuple[tuple[int, ...], int, list[dict[str, Any]]]:
    """Run a network's forward pass once, on zeros, in evaluation mode, and restore every module's mode.

    Returns:
        The batch's shape, of two samples; or of one, if ``input_shape`` has the batch dimension already and the network
        does not take another. The elements of all outputs for one sample, and again if they get a gradient. A summary
        of each module, in the order in which they finished. The network itself is none of them, unless it has no other.
    """
    layers: list[dict[str, Any]] = []
    variables = 0

    def shape_of_sample(value: Any) -> tuple[int, ...]:
        return tuple(next(tensors_of(value), torch.empty(0)).shape)[len(shape) - len(input_shape) :]

    def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
        nonlocal variables
        variables += sum(one.numel() * (2 if one.requires_grad else 1) for one in tensors_of(outputs))
        layers.append(
            {
                "input_shape": shape_of_sample(inputs),
                "output_shape": shape_of_sample(outputs),
                "parameter_count": get_parameter_count(module),
                "layer_type_name": type(module).__name__,
            }
        )

    shape = (2, *input_shape)
    with RandomState(), torch.enable_grad(), modes_kept([network]), ExitStack() as hooks:
        for module in [*network.modules()][bool(next(network.children(), None)) :]:
            hooks.enter_context(module.register_forward_hook(add))
        network.eval()
        try:
            network(_zeros_for(network, shape))
        except (RuntimeError, ValueError, TypeError, IndexError):
            if len(input_shape) < 2 or input_shape[0] != 1:
                raise
            layers.clear()
            variables, shape = 0, tuple(input_shape)
            network(_zeros_for(network, shape))
    return shape, variables // shape[0], layers


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


@dataclass(eq=False, repr=False)
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

    Attributes:
        input_item_size, output_item_size: bytes of a number in a sample's input, and in its target.
        input_size, output_size: bytes of a sample's input, and of its target.
        sample_size: bytes of a sample with its target.
        parameter_count: elements of the model's parameters.
        model_memory_usage: their bytes.
        total_intermediate_variable_count: see :func:`get_variable_count`.
        single_sample_memory_usage: bytes of a sample and of all modules' outputs for it, with their gradients, in the
            input's precision.
        batch_size: samples in a batch, a multiple of ``one_read_count``.
        sample_count_in_single_batch: identities in a batch.
        sample_batch_memory_footprint: bytes of a batch with its targets.
        allowed_sample_count: identities whose samples fit in host memory, in whole batches.
        batch_count: full batches in an epoch.
        batch_count_in_memory: batches that host memory holds.
        total_read_count: fillings of host memory per epoch.

    Raises:
        NotEnoughGPURam: the model, or the samples of one read, do not fit in ``gpu_memory_limit``.
        MemoryBudgetError: the samples of one read do not fit in ``cpu_memory_limit``.

    >>> from speedswap.compat.pytorch_memory import KiB, MiB
    >>> config = Config(KiB(1), MiB(1), (8,), (1,), lambda: nn.Linear(8, 1), 100, np.float32, np.float32, 2, 7)
    >>> config.sample_size, config.batch_size, config.allowed_sample_count
    (36, 6, 12)
    """

    cpu_memory_limit: int
    gpu_memory_limit: int
    input_shape: Sequence[int]
    output_shape: Sequence[int]
    model_class: InitVar[Network]
    total_sample_count: int
    input_dtype: Any = np.float64
    output_dtype: Any = np.float64
    one_read_count: int = 1
    preferred_batch_size: int | None = None
    _: KW_ONLY
    optimizer: InitVar[Any] = None

    def __post_init__(self, model_class: Network, optimizer: Any) -> None:
        for name in ("total_sample_count", "one_read_count", "preferred_batch_size"):
            if name != "preferred_batch_size" or self.preferred_batch_size is not None:
                require_integer(name, getattr(self, name))
        self.input_shape, self.output_shape = tuple(self.input_shape), tuple(self.output_shape)
        self.input_item_size = as_dtype(self.input_dtype).itemsize
        self.output_item_size = as_dtype(self.output_dtype).itemsize
        self.input_size = self.input_item_size * i_arr_mul(self.input_shape)
        self.output_size = self.output_item_size * i_arr_mul(self.output_shape)
        self.sample_size = self.input_size + self.output_size
        read_bytes = self.sample_size * self.one_read_count
        if read_bytes > self.cpu_memory_limit:
            raise MemoryBudgetError(
                f"cpu_memory_limit is {self.cpu_memory_limit}, but the samples of one read take {read_bytes}; give more"
            )
        network = _built(model_class)
        self.parameter_count = get_parameter_count(network)
        self.model_memory_usage = sum(parameter.nbytes for parameter in network.parameters())
        if self.model_memory_usage >= self.gpu_memory_limit:
            raise NotEnoughGPURam(
                f"gpu_memory_limit is {self.gpu_memory_limit}, but the model's parameters alone take "
                f"{self.model_memory_usage}; give more, or make the model smaller"
            )
        batch_shape, self.total_intermediate_variable_count, _ = _run(network, self.input_shape)
        self.single_sample_memory_usage = (
            self.sample_size + self.total_intermediate_variable_count * self.input_item_size
        )
        fits = self._most_samples(network, batch_shape, optimizer)
        self.preferred_batch_size = self.preferred_batch_size or fits
        allowed = min(self.total_sample_count, self.cpu_memory_limit // read_bytes)
        most = min(fits, self.preferred_batch_size, allowed * self.one_read_count)
        self.batch_size = round_to(max(most, self.one_read_count), self.one_read_count)
        self.sample_batch_memory_footprint = self.batch_size * self.sample_size
        self.sample_count_in_single_batch = self.batch_size // self.one_read_count
        self.allowed_sample_count = round_to(allowed, self.sample_count_in_single_batch)
        self.batch_count = self.total_sample_count // self.sample_count_in_single_batch
        self.batch_count_in_memory = self.allowed_sample_count // self.sample_count_in_single_batch
        self.total_read_count = -(-self.total_sample_count // self.allowed_sample_count)

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


Item = TypeVar("Item")

Sample = np.ndarray | Tensor
MemorySamples = Iterable[Sample]
Batch = Iterable[Sample]
Epoch = Iterable[tuple[Batch, Batch]]

Reader = Callable[[Any], Iterable[Any]]
Apply = Callable[[Iterable[Any]], Any]


def _counted(name: str, read: Reader, wanted: int, dtype: Any) -> Reader:
    """Wrap a reader to require a number of samples, and convert them to NumPy's or torch's ``dtype`` if given."""
    convert: Any = torch.as_tensor if isinstance(dtype, torch.dtype) else np.asarray

    def samples_of(identity: Any) -> list[Any]:
        samples = list(itertools.islice(read(identity), wanted + 1))
        if len(samples) != wanted:
            count = f"more than {wanted}" if len(samples) > wanted else len(samples)
            raise BatchError(
                f"{name}({identity!r}) gave {count} samples, but one_read_count is {wanted}; give the Config the "
                "number of samples per read"
            )
        return samples if dtype is None else [convert(sample, dtype=dtype) for sample in samples]

    return samples_of


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
        reads, identities = configs.one_read_count, slice(configs.total_sample_count)
        least = configs.sample_batch_memory_footprint * (2 if own else 1) + reads * configs.sample_size
        self.configs = configs
        self._feed = feed(
            input_list[identities],
            _counted("read_input", read_input, reads, None if apply_on_input_batch else configs.input_dtype),
            configs.batch_size,
            budget_bytes=max(configs.cpu_memory_limit, least),
            epochs=None,
            targets=output_list[identities],
            read_target=_counted(
                "get_output", get_output, reads, None if apply_on_output_batch else configs.output_dtype
            ),
            variants=reads,
            shuffle=shuffle,
            drop_last=self._drop_last,
            collate=apply if own else None,
        )
        self._count = 0

    def generate_epochs(self, epoch_count: int = 1) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yield epochs, each of which reads all samples again and drops the rest that does not fill a batch."""
        return map(self._feed.epoch, range(epoch_count))


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

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

from speedswap.compat.pytorch_memory.config import (
    Config,
    GiB,
    KiB,
    MiB,
    NotEnoughGPURam,
    i_arr_mul,
    round_to,
)
from speedswap.compat.pytorch_memory.epochs import (
    Batch,
    Epoch,
    Feeder,
    MemorySamples,
    Sample,
    generate_epoch,
    generator_with_stop_iteration,
    multiply_epochs,
)
from speedswap.compat.pytorch_memory.networks import (
    InspectNetwork,
    get_parameter_count,
    get_variable_count,
    summary_of_network,
)

__all__ = [
    "Batch",
    "Config",
    "Epoch",
    "Feeder",
    "GiB",
    "InspectNetwork",
    "KiB",
    "MemorySamples",
    "MiB",
    "NotEnoughGPURam",
    "Sample",
    "generate_epoch",
    "generator_with_stop_iteration",
    "get_parameter_count",
    "get_variable_count",
    "i_arr_mul",
    "multiply_epochs",
    "round_to",
    "summary_of_network",
]

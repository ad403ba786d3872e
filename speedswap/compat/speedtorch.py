"""SpeedTorch 0.1.6 under its own names, over :mod:`speedswap`'s switchers and tables.

With ``import speedswap.compat.speedtorch as SpeedTorch`` in place of ``import SpeedTorch`` a script runs unchanged, on
a machine with a GPU or without one. All classes and methods of 0.1.6 are here with their argument orders::

    collection      in CuPy memory            in a file             in torch memory, by where
    weights         ModelFactory              ModelFactoryMM        PytorchModelFactory, GPUPytorch…, CPUPytorch…
    optimizer       OptimizerFactory          OptimizerFactoryMM    PytorchOptimizerFactory, GPUPytorch…, CPUPytorch…
    co-occurrence   COM                       COMMM                 PytorchCOM, GPUPytorchCOM, CPUPytorchCOM
    data            DataGadget                DataGadgetMM

Differences:

* Memory. Collections are tables: pinned memory takes the bytes it holds and no more, CuPy's allocator is left alone,
  and neither CuPy nor a GPU is needed. ``CPUPinn`` without a GPU is ordinary memory, and ``deviceType='cuda'`` without
  one works on the CPU; each says so once.
* Optimizers. Any optimizer that treats rows independently works, SGD too; a trial finds its state per row. Rprop needs
  no backward pass first. The swapped state is that of the named variable, at any position among the model's parameters.
  SparseAdam is refused: the gradients of the rows are dense, so Adam does the same.
* Wrong names raise an error instead of printing one.
* Indexes are checked: one outside the collection, negative ones included, is an ``IdError`` before anything moves. They
  may be arrays or tensors of any integer dtype. Where an index occurs twice, the last row is written and a warning says
  so once.
* Losses. A kept loss does not obstruct a batch of another size; differentiating a loss after its rows were swapped out
  is an error.
* dtypes are as requested, in files too.
* ``getCupyVar`` and ``getCupyMM``, or ``CUPYcorpus`` and ``CUPYmemmap``, are the collection itself, not a copy: a CuPy
  array if CuPy and a GPU are available and the collection is in GPU or pinned memory, else a NumPy array;
  ``getTorchVar`` is a torch tensor. Writes to it are writes to the collection. For optimizers these,
  ``getNumpyVersion`` and the saved arrays are by name: ``{"exp_avg": …}``.
* Files. ``saveCupy`` writes ``.npy``, and ``.npz`` for optimizers; nothing is pickled and no pickles are read.
  ``saveTorch`` writes with ``torch.save`` from the CPU; ``loadTorch`` reads with ``weights_only=True``. A collection of
  an ``…MM`` class is a directory, ``<diskname><number>.memmap``, with the first free number, and ``.npy`` files of the
  weights or of each state, which NumPy opens and in which rows are read and written; ``loadCupy`` of that directory
  continues with it. Its pages are never pinned, so ``CPUPinn`` is ignored. For tables that survive a kill between two
  steps, give :class:`speedswap.ModelFactory` a ``diskname``. The ``ModelFactory`` here takes none, as in
  0.1.6, although its README shows one.
* ``DataGadgetMM`` maps its ``.npy`` file itself, so that ``insertData`` changes the file.
* ``getData`` and ``insertData`` take NumPy's and CuPy's indexes: arrays, slices, masks, None, Ellipsis, and tuples of
  these with NumPy's meaning: rows by number are a list or an array. A row is never counted from the end, and a
  number that is too large is an error, where CuPy wraps it around. ``insertData`` takes data of the shape that
  ``getData`` returns for the same indexes, of another shape of the same size, or data that NumPy would broadcast.
* Co-occurrence matrices work: ``getCupyVar()`` (also ``CUPYCom``), ``getCupyMM()`` or ``getTorchVar()`` is the matrix
  to count in.
* ``PMemory`` and the pinned allocators are gone, as nothing allocates that way any more.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap import swapping
from speedswap._words import warn_once
from speedswap.compat.gadgets import CupyMethods, DataGadget, DataGadgetMM, DiskMethods, TorchMethods, result_of
from speedswap.swapping.switchers.collection import Collection, RowField, as_dtype
from speedswap.tables import Device, Pageable, Pinned, Storage
from speedswap.tables.record import count

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
]

# SpeedTorch's modules, importable by their names too.
CPUCupyPinned = CPUTorchPinned = CUPYLive = GPUTorch = GenTorch = sys.modules[__name__]
_MODULES = ("CPUCupyPinned", "CPUTorchPinned", "CUPYLive", "GPUTorch", "GenTorch")
sys.modules.update({f"{__name__}.{name}": GenTorch for name in _MODULES})

FileName = str | os.PathLike[str]
DeviceName = str | torch.device


class _InTorchMemory(TorchMethods):
    """A collection whose constructor looks up where it lives: in GPU memory, or in host memory, pinned or not."""

    deviceType: DeviceName = "cuda"
    pinType: bool = False

    def _place(self) -> Storage:
        if str(self.deviceType) not in ("cuda", "cpu"):
            raise ValueError(f"deviceType is {str(self.deviceType)!r}; choose 'cuda' or 'cpu'")
        if str(self.deviceType) == "cpu":
            return Pinned() if self.pinType else Pageable()
        if self.pinType:
            raise ValueError(
                "pinType is True, but deviceType is 'cuda' and only host memory is pinned; give deviceType='cpu'"
            )
        if not torch.cuda.is_available():
            warn_once("SW508", "deviceType 'cuda' works as 'cpu' here: torch sees no CUDA device")
            return Pageable()
        return Device()


# ---------------------------------------------------------------------- weights


class ModelFactory(CupyMethods, swapping.ModelFactory):
    """:class:`speedswap.ModelFactory` without a file."""

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype=datatype, CPUPinn=CPUPinn)


class ModelFactoryMM(DiskMethods, swapping.ModelFactory):
    """:class:`speedswap.ModelFactory` in a file, always: ``<diskname><number>.memmap``."""

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        diskname: FileName = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, diskname, datatype, CPUPinn)


class _TorchModelFactory(_InTorchMemory, swapping.ModelFactory):
    def __init__(
        self, model_variable: nn.Module, total_classes: int, embed_dimension: int, datatype: Any = torch.float
    ) -> None:
        storage = self._place()
        super().__init__(model_variable, total_classes, embed_dimension, datatype=datatype, storage=storage)


class GPUPytorchModelFactory(_TorchModelFactory):
    """:class:`PytorchModelFactory` in GPU memory."""


class CPUPytorchModelFactory(_TorchModelFactory):
    """:class:`PytorchModelFactory` in pinned host memory."""

    deviceType, pinType = "cpu", True


class PytorchModelFactory(_TorchModelFactory):
    """:class:`speedswap.ModelFactory` in GPU memory (``deviceType='cuda'``) or in host memory, pinned or not."""

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        deviceType: DeviceName = "cuda",
        pinType: bool = False,
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        super().__init__(model_variable, total_classes, embed_dimension, datatype)


# ---------------------------------------------------------------------- optimizers


class OptimizerFactory(CupyMethods, swapping.OptimizerFactory):
    """:class:`speedswap.OptimizerFactory` of one process."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, CPUPinn)


class OptimizerFactoryMM(DiskMethods, OptimizerFactory):
    """:class:`speedswap.OptimizerFactory` in a file: ``<variable_name><optimizer><number>.memmap``."""

    @property
    def diskname(self) -> str:  # type: ignore[override]
        """The beginning of the file's name."""
        return self.variable_name.removesuffix(".weight") + type(self.given_optimizer).__name__


class _TorchOptimizerFactory(_InTorchMemory, swapping.OptimizerFactory):
    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
    ) -> None:
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, storage=self._place()
        )


class GPUPytorchOptimizerFactory(_TorchOptimizerFactory):
    """:class:`PytorchOptimizerFactory` in GPU memory."""


class CPUPytorchOptimizerFactory(_TorchOptimizerFactory):
    """:class:`PytorchOptimizerFactory` in pinned host memory."""

    deviceType, pinType = "cpu", True


class PytorchOptimizerFactory(_TorchOptimizerFactory):
    """:class:`speedswap.OptimizerFactory` in GPU memory (``deviceType='cuda'``) or in host memory, pinned or not."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        deviceType: DeviceName = "cuda",
        pinType: bool = False,
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)


# ---------------------------------------------------------------------- co-occurrence matrices


class _Matrix(Collection):
    """A matrix of ``total_classes`` × ``total_classes`` zeros to count in."""

    init_methods = "comInit or loadCupy"

    def __init__(self, total_classes: int, datatype: Any, storage: Storage) -> None:
        size = count("total_classes", total_classes)
        super().__init__(size, [RowField("weight", (size,), as_dtype(datatype))], storage=storage, name="COM")
        self.total_classes, self.datatype = total_classes, datatype


class COM(CupyMethods, _Matrix):
    """A co-occurrence matrix, ``total_classes`` × ``total_classes``, in GPU or pinned memory.

    >>> matrix = COM(3)
    >>> matrix.comInit()
    >>> matrix.getCupyVar()[0, 2] += 1
    >>> matrix.getNumpyVersion()
    array([[0, 0, 1],
           [0, 0, 0],
           [0, 0, 0]], dtype=uint32)
    """

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        super().__init__(total_classes, datatype, Pinned() if CPUPinn else Device())
        self.CPUPinn = CPUPinn

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, all zeros; in pinned memory if this or the constructor says so."""
        if CPUPinn:
            self.storage = Pinned()
        self.make()

    CUPYCom = result_of("getCupyVar")


class COMMM(DiskMethods, COM):
    """A co-occurrence matrix in a file, which is not pinned whatever ``CPUPinn``: ``<diskname><number>.memmap``."""

    def __init__(
        self, total_classes: int, diskname: FileName = "COM", datatype: Any = "uint32", CPUPinn: bool = False
    ) -> None:
        super().__init__(total_classes, datatype, CPUPinn)
        self.diskname = diskname


class _TorchMatrix(_InTorchMemory, _Matrix):
    def __init__(self, total_classes: int, datatype: Any = torch.int32) -> None:
        super().__init__(total_classes, datatype, self._place())

    def comInit(self) -> None:
        """Make the matrix, all zeros."""
        self.make()


class GPUPytorchCOM(_TorchMatrix):
    """:class:`PytorchCOM` in GPU memory."""


class CPUPytorchCOM(_TorchMatrix):
    """:class:`PytorchCOM` in pinned host memory."""

    deviceType, pinType = "cpu", True


class PytorchCOM(_TorchMatrix):
    """A co-occurrence matrix in GPU memory (``deviceType='cuda'``) or in host memory, pinned or not."""

    def __init__(
        self, total_classes: int, datatype: Any = torch.int32, deviceType: DeviceName = "cuda", pinType: bool = False
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        super().__init__(total_classes, datatype)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in ("PMemory", "PMemoryMM", "my_pinned_allocator", "my_pinned_allocatorMM"):
            raise AttributeError(
                f"speedswap has no {name}: CuPy's allocator is left alone; collections are pinned with CPUPinn=True, "
                "and speedswap.Table.create(…, storage='pinned') gives pinned rows of any kind"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

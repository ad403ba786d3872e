"""AIkit's names: a global batch shared out over the GPUs, with gradient accumulation for the rest.

Change ``import aikit…`` to ``import speedswap.compat.aikit…`` or ``from speedswap.compat import aikit``. Micro-batches
never exceed the maximum, add up to the global batch exactly, and mean losses are averaged over them. The TensorFlow
half (``aikit.elastic.TF``, ``aikit.ga.TF``) works on Keras 3 and needs the ``keras`` extra. ``torch`` and ``keras`` in
lower case, as AIkit's examples write them, are the same modules.

By design ``optimizer.aikit.step`` and ``.steps`` are read-only: these counts and the gradients of the window are saved
in ``state_dict()["accumulation"]``, without an object of a special class. ``.grad`` is cleared at every micro-step;
pending gradients are kept separately, in float32 for half-precision parameters.

>>> import torch
>>> from speedswap.compat import aikit
>>> aikit.elastic.Torch.init(256, 64, gpus=2)
>>> aikit.elastic.steps, aikit.elastic.batch_size
(2, 64)
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = aikit.ga.Torch.optim.Optimizer(torch.optim.SGD(model.parameters()), aikit.elastic.steps)
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The paths of AIkit and of runai, its predecessor, to each module.
_PATHS = {
    "elastic": "elastic elastic.Torch elastic.torch",
    "ga": "ga ga.Torch ga.Torch.optim ga.torch ga.torch.optim",
    "keras_half": "elastic.TF elastic.TF.model elastic.TF.models elastic.keras elastic.keras.model elastic.keras.models"
    " elastic.models ga.TF ga.TF.hooks ga.TF.optimizers ga.keras ga.keras.hooks ga.keras.optimizers",
}
_MODULES = {
    f"speedswap.compat.{root}.{path}": f"{__name__}.{module}"
    for root in ("aikit", "runai")
    for module, paths in _PATHS.items()
    for path in paths.split()
}


class _Aliases(MetaPathFinder, Loader):
    """The importer of modules under their aliases; Keras is imported with the first alias that needs it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a specification for an alias."""
        return ModuleSpec(fullname, self) if fullname in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the alias's own module by the one behind it, as the import system allows."""
        sys.modules[module.__name__] = importlib.import_module(_MODULES[module.__name__])


sys.meta_path.append(_Aliases())

from speedswap.compat.aikit import elastic, ga  # noqa: E402

__all__ = ["elastic", "ga"]

"""A model's parameters, counted by torchinfo, and the import of this package's optional dependencies."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from speedswap._words import pip_install


def import_optional(name: str) -> Any:
    """Return a module of the ``monitor`` extra.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise ImportError(f"{package} is not installed: {pip_install(package, extra='monitor')}") from error


@contextmanager
def modes_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put each module of some models back in its mode, training or evaluation, at the end of the block."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def count_parameters(model: nn.Module, *, example: Any = None) -> Any:
    """Count a model's parameters, module by module, with ``torchinfo.summary``.

    Unlike torchinfo's, the totals count a parameter that several modules share once, and parameters outside of
    ``example``'s forward pass too. Each module stays in its training or evaluation mode.

    Args:
        model: the model.
        example: arguments of the model (a tensor, a tuple, or a dictionary of named ones) for one forward pass in
            evaluation mode, which finds shapes, bytes of the outputs and multiply-adds. torchinfo keeps the model alive
            afterwards.

    Returns:
        A ``torchinfo.ModelStatistics``: ``total_params``, ``trainable_params``, ``total_param_bytes``,
        ``total_mult_adds``, ``summary_list``; ``print`` shows a table.

    Raises:
        ImportError: torchinfo is not installed.

    >>> tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    >>> tied[1].weight = tied[0].weight
    >>> count_parameters(tied).total_params
    12
    """
    torchinfo = import_optional("torchinfo")
    columns = ["num_params", "params_percent", "trainable"]
    with modes_kept([model]):
        statistics = torchinfo.summary(
            model,
            input_data=example,
            col_names=columns if example is None else ["output_size", *columns, "mult_adds"],
            depth=1 + max(name.count(".") + 1 for name, _ in model.named_modules()),
            row_settings=["depth", "var_names"],
            verbose=0,
        )
    parameters = list(model.parameters())
    statistics.total_params = sum(parameter.numel() for parameter in parameters)
    statistics.trainable_params = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    statistics.total_param_bytes = sum(parameter.nbytes for parameter in parameters)
    return statistics

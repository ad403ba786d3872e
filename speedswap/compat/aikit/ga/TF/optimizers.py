"""Keras's optimizers, each updating once for several micro-batches through its own ``gradient_accumulation_steps``."""

from __future__ import annotations

from typing import Any

from speedswap.compat.aikit.keras_extra import keras
from speedswap.errors import BatchError, OptimizerError

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "Nadam", "Optimizer", "RMSprop"]


def Optimizer(optimizer: Any, steps: int) -> Any:
    """Let a Keras optimizer accumulate; mean losses are averaged over the micro-batches.

    Args:
        optimizer: a Keras optimizer, new or with state, or the name of one.
        steps: micro-steps that make an update; 1 leaves it as it is.

    Returns:
        The same optimizer, with its state.

    Raises:
        BatchError: ``steps`` is not a positive integer.
        OptimizerError: the optimizer accumulates already, by another number of steps.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BatchError(f"steps is {steps!r}; it must be an integer of at least 1")
    optimizer = keras.optimizers.get(optimizer)
    present = optimizer.gradient_accumulation_steps or 1
    if present == steps:
        return optimizer
    if present != 1:
        raise OptimizerError(f"optimizer accumulates {present} steps already, not {steps}; give a plain one")
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built:  # what Keras makes in build, for an optimizer that has trained already
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]
        optimizer._iterations.assign(optimizer._iterations * steps)  # it counts micro-steps from now on
    return optimizer


def Adadelta(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.Adadelta``, accumulating."""
    return Optimizer(keras.optimizers.Adadelta(*args, **kwargs), steps)


def Adagrad(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.Adagrad``, accumulating."""
    return Optimizer(keras.optimizers.Adagrad(*args, **kwargs), steps)


def Adam(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.Adam``, accumulating."""
    return Optimizer(keras.optimizers.Adam(*args, **kwargs), steps)


def Adamax(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.Adamax``, accumulating."""
    return Optimizer(keras.optimizers.Adamax(*args, **kwargs), steps)


def Nadam(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.Nadam``, accumulating."""
    return Optimizer(keras.optimizers.Nadam(*args, **kwargs), steps)


def RMSprop(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.RMSprop``, accumulating."""
    return Optimizer(keras.optimizers.RMSprop(*args, **kwargs), steps)


def SGD(steps: int, *args: Any, **kwargs: Any) -> Any:
    """``keras.optimizers.SGD``, accumulating."""
    return Optimizer(keras.optimizers.SGD(*args, **kwargs), steps)

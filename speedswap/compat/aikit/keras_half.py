"""AIkit's TensorFlow half on Keras 3, on any of its backends: elastic batches and gradient accumulation.

``elastic.TF``, ``ga.TF`` and the modules in them (``models``, ``optimizers``, ``hooks``) are this module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from speedswap._words import a_kind, pip_install
from speedswap.batching.elastic import world
from speedswap.batching.nested import require_integer
from speedswap.compat.aikit import elastic
from speedswap.errors import OptimizerError


def _import_keras() -> Any:
    remedy = pip_install("keras", extra="keras")
    if "keras" not in sys.modules and not any(importlib.util.find_spec(name) for name in ("tensorflow", "jax")):
        os.environ.setdefault("KERAS_BACKEND", "torch")  # the default would be TensorFlow
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ImportError(
            f"aikit's TensorFlow half works on Keras 3, which is not installed: {remedy}", name="keras"
        ) from error
    if int(keras.__version__.split(".")[0]) < 3:
        raise ImportError(f"keras is {keras.__version__}, but aikit's TensorFlow half needs 3 or newer: {remedy}")
    return keras


keras: Any = _import_keras()

# ---------------------------------------------------------------------- elastic


def init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> None:
    """Divide a global batch over the GPUs that train together; the results are attributes of ``elastic``.

    Args:
        global_batch_size: samples in one update.
        max_gpu_batch_size: samples that fit one GPU at once.
        gpus: workers that share the batch. By default the devices of ``keras.distribution``'s present distribution,
            else one for each process: without a distribution, Keras trains on one device.

    Raises:
        BatchError: a size is not a positive integer, or ``gpus`` is not a multiple of the number of processes.
    """
    distribution = keras.distribution.distribution()
    if gpus is None:
        gpus = world().world_size if distribution is None else int(distribution.device_mesh.devices.size)
    elastic.init(global_batch_size, max_gpu_batch_size, gpus)


class Model:
    """A Keras model whose ``compile`` and ``fit`` accumulate as computed by ``elastic.TF.init``.

    Everything else is the model's. ``fit`` feeds arrays in batches of ``elastic.loader_batch_size``, and updates with
    the rest of a window at the end of each epoch. If the sizes of a plan differ, all batches have the largest, so an
    update sees up to ``steps`` samples more; feed ``elastic.micro_batch_sizes`` yourself if that matters.

    Args:
        model: the Keras model; it stays available as ``Model.model``.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(f"model is {a_kind(model)}; give a keras.Model")
        self.model = model

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Compile as ``keras.Model.compile``, with an optimizer that accumulates ``elastic.steps`` micro-batches."""
        self.model.compile(Optimizer(optimizer, elastic.steps), *args, **kwargs)

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Fit as ``keras.Model.fit``, with arrays in batches of the elastic size and output by the master process."""
        if batch_size is None and (hasattr(x, "shape") or isinstance(x, (list, tuple, dict))):
            batch_size = elastic.loader_batch_size
        if not elastic.master:
            kwargs.setdefault("verbose", 0)
        callbacks = kwargs.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks)
        return self.model.fit(x, y, batch_size=batch_size, callbacks=[Flush(), *callbacks], **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


# ---------------------------------------------------------------------- gradient accumulation


def Optimizer(optimizer: Any, steps: int) -> Any:
    """Make a Keras optimizer accumulate; mean losses are averaged over the micro-batches.

    Args:
        optimizer: a Keras optimizer, new or with state, or the name of one.
        steps: micro-steps per update; 1 leaves the optimizer unchanged.

    Returns:
        The same optimizer, with its state.

    Raises:
        BatchError: ``steps`` is not a positive integer.
        OptimizerError: the optimizer accumulates already, by another number of steps.
    """
    require_integer("steps", steps)
    optimizer = keras.optimizers.get(optimizer)
    present = optimizer.gradient_accumulation_steps or 1
    if present == steps:
        return optimizer
    if present != 1:
        raise OptimizerError(f"optimizer accumulates {present} steps already, not {steps}; give a plain one")
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built:  # as Keras's build does, for an optimizer that has trained already
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]
        optimizer._iterations.assign(optimizer._iterations * steps)  # it counts micro-steps from now on
    return optimizer


def _accumulating(name: str) -> Callable[..., Any]:
    def made(steps: int, *args: Any, **kwargs: Any) -> Any:
        return Optimizer(getattr(keras.optimizers, name)(*args, **kwargs), steps)

    made.__name__ = made.__qualname__ = name
    made.__doc__ = f"Return a ``keras.optimizers.{name}`` of the further arguments that accumulates ``steps`` steps."
    return made


Adadelta, Adagrad, Adam, Adamax, Nadam, RMSprop, SGD = map(
    _accumulating, ("Adadelta", "Adagrad", "Adam", "Adamax", "Nadam", "RMSprop", "SGD")
)


def flush(optimizer: Any) -> bool:
    """Update with the mean of the micro-batches that a Keras optimizer has accumulated since its last update.

    Keras itself would carry them into the next epoch, and lose them after the last.

    Args:
        optimizer: a Keras optimizer, accumulating or not.

    Returns:
        Whether there were any.
    """
    steps = optimizer.gradient_accumulation_steps or 1
    pending = int(optimizer._iterations.value) % steps
    if not pending:
        return False
    for gradient in optimizer._accumulated_gradients:
        gradient.assign(gradient * (steps / pending))
    optimizer._iterations.assign(optimizer._iterations + (steps - pending - 1))  # the next micro-step is the last
    variables = optimizer._trainable_variables
    optimizer.apply([keras.ops.zeros(variable.shape, dtype=variable.dtype) for variable in variables], variables)
    return True


class Flush(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that updates with the rest of a window after each epoch: ``model.fit(…, callbacks=[Flush()])``."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Flush the model's optimizer."""
        flush(self.model.optimizer)


model = models = hooks = optimizers = sys.modules[__name__]
__path__: list[str] = []  # a package of aliases

"""What is left of a Keras optimizer's window when an epoch ends."""

from __future__ import annotations

from typing import Any

from speedswap.compat.aikit.keras_extra import keras

__all__ = ["Flush", "flush"]


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
    """Updates with what is left of a window at the end of each epoch: ``model.fit(…, callbacks=[Flush()])``."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Flush the model's optimizer."""
        flush(self.model.optimizer)

"""torch's optimizers, each stepping once for several micro-batches."""

from speedswap.compat.aikit.ga.Torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Optimizer,
    RMSprop,
    Rprop,
)

__all__ = ["ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Optimizer", "RMSprop", "Rprop"]

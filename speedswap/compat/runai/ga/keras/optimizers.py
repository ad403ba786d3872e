"""Keras's optimizers, each updating once for several micro-batches."""

from speedswap.compat.aikit.ga.TF.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, Nadam, Optimizer, RMSprop

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "Nadam", "Optimizer", "RMSprop"]

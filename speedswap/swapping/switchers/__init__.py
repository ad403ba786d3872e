"""Switchers: SpeedTorch's interface to rows that are swapped by hand around each training step.

A model keeps an ``nn.Embedding`` as large as a batch. Before the forward pass a :class:`ModelFactory` puts the batch's
rows into its weight and an :class:`OptimizerFactory` their state into the optimizer; after the optimizer's step both
write them back to the full collections. The model looks up positions 0, 1, … instead of ids.
:class:`speedswap.Embedding` does all of this automatically, and sums the gradients of equal ids.
"""

from speedswap.swapping.switchers.factories import ModelFactory, OptimizerFactory

__all__ = ["ModelFactory", "OptimizerFactory"]

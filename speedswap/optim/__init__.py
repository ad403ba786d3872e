"""Optimizers that work row by row, for tables and for any matrix of parameters; averages of a model's parameters.

The optimizers are subclasses of ``torch.optim.Optimizer``, used as torch's own, with :func:`speedswap.attach` or
without.
"""

from speedswap.optim.averaged_model import Averaged
from speedswap.optim.rowwise_adagrad import RowwiseAdagrad

__all__ = ["Averaged", "RowwiseAdagrad"]

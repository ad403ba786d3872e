"""AIkit's names: a global batch shared out over the GPUs there are, and gradient accumulation for the rest.

Change ``import aikit…`` to ``import speedswap.compat.aikit…`` or ``from speedswap.compat import aikit``. Micro-batches
never exceed the maximum, add up to the global batch exactly, and mean losses are averaged over them. The TensorFlow
half (``aikit.elastic.TF``, ``aikit.ga.TF``) works on Keras 3 and needs the ``keras`` extra. ``torch`` and ``keras`` in
small letters, as AIkit's examples write them, are the same modules.

By design ``optimizer.aikit.step`` and ``.steps`` are there to be read: what they count, and the gradients of the
window, are saved in ``state_dict()["accumulation"]``, without an object of a class of its own. ``.grad`` is cleared at
every micro-step; what is pending is kept beside it, in float32 for half-precision parameters.

>>> import torch
>>> from speedswap.compat import aikit
>>> aikit.elastic.Torch.init(256, 64, gpus=2)
>>> aikit.elastic.steps, aikit.elastic.batch_size
(2, 64)
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = aikit.ga.Torch.optim.Optimizer(torch.optim.SGD(model.parameters()), aikit.elastic.steps)
"""

from speedswap.compat.aikit import elastic, ga

__all__ = ["elastic", "ga"]

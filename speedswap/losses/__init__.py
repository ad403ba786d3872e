"""Losses over more rows than fit: softmax over sampled rows, or over all rows in bounded memory.

:func:`sampled_softmax` trains rows as targets and negatives of a step. Negatives come from :class:`UniformSampler`,
:class:`LogUniformSampler`, :class:`UnigramSampler`, :func:`in_batch` or the caller (:class:`Negatives`), and
:func:`candidates` lists what is looked up. :func:`full_softmax` is the exact loss over a whole table, whose rows are
constants; :func:`target_ranks` ranks the targets among all rows.
"""

from speedswap.losses.full import full_softmax, target_ranks
from speedswap.losses.sampled import (
    LogUniformSampler,
    Negatives,
    UniformSampler,
    UnigramSampler,
    candidates,
    in_batch,
    sampled_softmax,
)

__all__ = [
    "LogUniformSampler",
    "Negatives",
    "UniformSampler",
    "UnigramSampler",
    "candidates",
    "full_softmax",
    "in_batch",
    "sampled_softmax",
    "target_ranks",
]

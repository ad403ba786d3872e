"""Negatives of sampled losses: ids, with how often each was expected among the draws."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.tables.record import count


class Negatives(NamedTuple):
    """Sampled ids, drawn with replacement.

    Attributes:
        ids: int32 or int64, shape (num_sampled,), shared by all samples, or (*samples, num_sampled); for items with an
            id map: keys, also as a list or array of strings. None for :func:`in_batch` negatives.
        log_expected_count: shape of ids, on any device: the logarithm of how often each of them is expected among the
            ``num_sampled`` draws; None to leave logits uncorrected.
    """

    ids: Any
    log_expected_count: Tensor | None = None


def in_batch(log_probability: Tensor | None = None) -> Negatives:
    """Return the other samples' targets as negatives.

    Args:
        log_probability: shape of the targets, on any device: the logarithm of how often each target occurs among all
            targets of the data; None to leave logits uncorrected.
    """
    return Negatives(None, log_probability)


class CandidateSampler:
    """A distribution of ids from which negatives are drawn, independently and with replacement.

    Args:
        num_sampled: ids per draw.
        range_max: ids are 0 to ``range_max`` - 1.
    """

    def __init__(self, num_sampled: int, range_max: int) -> None:
        self.num_sampled = count("num_sampled", num_sampled)
        self.range_max = count("range_max", range_max)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Negatives:
        """Draw negatives.

        Args:
            shape: of the samples, if each gets its own negatives; () for negatives that all samples share.
            generator: draws the numbers; torch's own by default.

        Returns:
            Ids, int64, shape (*shape, num_sampled), on the CPU (those of a :class:`UnigramSampler` are where its
            ``unigrams`` are).
        """
        ids = self._drawn((*shape, self.num_sampled), generator)
        return Negatives(ids, self.log_probability(ids) + math.log(self.num_sampled))

    def log_probability(self, ids: Tensor) -> Tensor:
        """Return the logarithm of each id's probability in one draw, float64, of the ids' shape."""
        raise NotImplementedError

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError


class UniformSampler(CandidateSampler):
    """Draws every id of 0 to ``range_max`` - 1 equally often.

    Example:
        >>> from speedswap.losses import UniformSampler
        >>> negatives = UniformSampler(num_sampled=3, range_max=12).sample()
        >>> negatives.ids.shape, negatives.log_expected_count.exp()
        (torch.Size([3]), tensor([0.2500, 0.2500, 0.2500], dtype=torch.float64))
    """

    def log_probability(self, ids: Tensor) -> Tensor:
        return torch.full(ids.shape, -math.log(self.range_max), dtype=torch.float64, device=ids.device)

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randint(self.range_max, shape, generator=generator, device="cpu")


class LogUniformSampler(CandidateSampler):
    """Draws id k with probability log((k + 2) / (k + 1)) / log(``range_max`` + 1): ids in order of falling frequency.

    Source: the distribution of TensorFlow's ``log_uniform_candidate_sampler``, which approximates Zipf's.

    Example:
        >>> import torch
        >>> from speedswap.losses import LogUniformSampler
        >>> LogUniformSampler(num_sampled=100, range_max=3).log_probability(torch.arange(3)).exp()
        tensor([0.5000, 0.2925, 0.2075], dtype=torch.float64)
    """

    def log_probability(self, ids: Tensor) -> Tensor:
        return torch.log(torch.log1p(1 / (ids.double() + 1)) / math.log1p(self.range_max))

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
        return (uniform * math.log1p(self.range_max)).expm1_().long().clamp_(max=self.range_max - 1)


class UnigramSampler(CandidateSampler):
    """Draws ids in proportion to their frequency, raised to a power.

    Args:
        num_sampled: ids per draw.
        unigrams: each id's frequency, shape (range_max,), on any device, of any real dtype; 0 for ids never drawn.
        distortion: the power; 0.75 as in word2vec, 0 for a uniform distribution over the ids that occur.

    Raises:
        ValueError: a frequency is negative or not finite, or all are 0.

    Example:
        >>> import torch
        >>> from speedswap.losses import UnigramSampler
        >>> sampler = UnigramSampler(num_sampled=2, unigrams=torch.tensor([0, 3, 1]))
        >>> sampler.log_probability(torch.arange(3)).exp()
        tensor([0.0000, 0.7500, 0.2500], dtype=torch.float64)
    """

    def __init__(self, num_sampled: int, unigrams: Tensor, *, distortion: float = 1.0) -> None:
        kernels.require_dense(unigrams, "unigrams")
        if unigrams.dim() != 1:
            raise ValueError(f"unigrams has shape {tuple(unigrams.shape)}; give one frequency per id")
        super().__init__(num_sampled, len(unigrams))
        frequency = unigrams.detach().double()
        power = frequency.pow(distortion).where(frequency != 0, 0)
        self._ends = torch.cat([power.new_zeros(1), power.cumsum(0)])  # the range of ids in the sum of all powers
        if frequency.min() < 0 or not 0 < self._ends[-1] < math.inf:
            raise ValueError(
                f"unigrams has frequencies from {frequency.min():g} to {frequency.max():g}, and powers whose sum is "
                f"{self._ends[-1]:g}; give finite ones, none negative and some positive"
            )

    def log_probability(self, ids: Tensor) -> Tensor:
        places = ids.to(self._ends.device).long()
        return torch.log((self._ends[places + 1] - self._ends[places]) / self._ends[-1]).to(ids.device)

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator, device=self._ends.device)
        below = torch.nextafter(self._ends[-1], self._ends[0])  # a product may be rounded up to the sum
        return torch.searchsorted(self._ends[1:], (uniform * self._ends[-1]).clamp_(max=below), right=True)


def as_negatives(negatives: Any) -> Negatives:
    """Return negatives in one form: those of a sampler drawn, ids of the caller uncorrected."""
    drawn = negatives.sample() if isinstance(negatives, CandidateSampler) else negatives
    return drawn if isinstance(drawn, Negatives) else Negatives(require_ids("negatives", drawn))


def require_ids(name: str, ids: Any) -> Any:
    """Return ids or keys; raise TypeError if they cannot be any."""
    if isinstance(ids, Tensor):
        kernels.require_id_dtype(ids, name)
    elif not hasattr(ids, "__len__"):
        raise TypeError(f"{name} is {a_kind(ids)}; give a tensor of ids, or keys if items has an id map")
    return ids

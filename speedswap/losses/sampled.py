"""Softmax over targets and sampled negatives, whose rows come in one gather; and the samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind, require_kind
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


IGNORE_INDEX = -100  # torch's


def candidates(targets: Any, negatives: Any, *, ignore_index: int | None = IGNORE_INDEX) -> Any:
    """Return the ids that :func:`sampled_softmax` looks up, to announce them to a :func:`speedswap.lookahead`.

    Args:
        targets, negatives, ignore_index: as for :func:`sampled_softmax`, with negatives drawn already.

    Returns:
        Targets that are not ignored, then negatives: shape (n,), on the targets' device; a NumPy array of keys that are
        in no tensor.

    Raises:
        TypeError: ``negatives`` is a sampler, or ids have another type.

    Example:
        >>> import torch, speedswap
        >>> from speedswap.losses import Negatives, candidates
        >>> candidates(torch.tensor([7, -100, 3]), Negatives(torch.tensor([1, 2])))
        tensor([7, 3, 1, 2])
    """
    if isinstance(negatives, CandidateSampler):
        raise TypeError(f"negatives is {a_kind(negatives)}, which draws others each time; give sampler.sample()")
    drawn = as_negatives(negatives).ids
    parts = [require_ids("targets", targets), *([] if drawn is None else [require_ids("negatives", drawn)])]
    if len({isinstance(each, Tensor) for each in parts}) > 1:
        raise TypeError(f"targets is {a_kind(targets)} and negatives {a_kind(drawn)}; give two tensors, or none")
    if not isinstance(targets, Tensor):
        return np.concatenate([np.asarray(each).reshape(-1) for each in parts])
    found = targets[kept(targets, ignore_index).to(targets.device)]
    return torch.cat([found, *(each.reshape(-1).to(found) for each in parts[1:])])


def sampled_softmax(
    hidden: Tensor,
    targets: Any,
    items: Callable[[Any], Tensor],
    negatives: Any,
    *,
    bias: Callable[[Any], Tensor] | None = None,
    remove_accidental_hits: bool = True,
    ignore_index: int | None = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    r"""Return the cross-entropy of the targets among targets and sampled negatives.

    It estimates the cross-entropy of a softmax over all rows, ``F.cross_entropy(hidden @ all_rows.T, targets)``, from
    the rows of targets and negatives alone, which come in one lookup, as :func:`candidates` lists them. Their gradients
    go through ``items`` like those of any lookup. With ``o`` for inner products, the loss of a sample with target t and
    negatives s drawn from Q is

    -o_t + log(exp(o_t) + Σ exp(o_s - log(num_sampled · Q(s)))), over all s ≠ t,

    whose sum has the expectation of the whole table's, so that loss and gradients approach the exact ones as
    ``num_sampled`` grows. (TensorFlow's ``sampled_softmax_loss`` corrects the target's logit too, which suits samples
    without repetition.)

    Args:
        hidden: shape (\*samples, dim), of a floating-point dtype.
        targets: ids, int32 or int64, shape (\*samples,), or (\*samples, n) for several targets per sample, each of the
            same probability. For items with an id map: keys, also strings in lists or arrays.
        items: looks rows up, (n,) → (n, dim): a :class:`speedswap.Embedding`, a table of an
            :class:`speedswap.EmbeddingCollection` (``tables.embeddings["item"]``), a ``torch.nn.Embedding``, or any
            function. Its ``padding_idx`` is never a negative.
        negatives: a sampler, which is drawn from in this call, for all samples together; :class:`Negatives` that were
            drawn before; negatives :func:`in_batch`; or ids, as :class:`Negatives` has them, without a correction.
        bias: looks up biases of the same ids, (n,) → (n, 1): an embedding of width 1.
        remove_accidental_hits: leave out negatives that are a target of the sample; in-batch ones always are.
        ignore_index: marks places of ``targets`` (a tensor) without a target; samples without any count for nothing.
        reduction: ``"mean"`` over the samples that have a target, 0 if none has; ``"sum"``; or ``"none"``.

    Returns:
        A number; for ``"none"`` shape (\*samples,), 0 for ignored samples. Of hidden's and the rows' dtype, or float32
        for half precision. Ranks that own the rows each have the loss of the samples and negatives they give.

    Raises:
        ValueError, TypeError: a shape, dtype or setting does not fit. Nothing was looked up.
        IdError, IdMapError: as ``items`` raises them.

    Source: Bengio and Senécal, Adaptive importance sampling to accelerate training of a neural probabilistic language
    model, 2008, equation 12, in the form of Blanc and Rendle, Adaptive sampled softmax with kernel based sampling,
    2018; for :func:`in_batch`, Yi et al., Sampling-bias-corrected neural modeling for large corpus item
    recommendations, 2019.

    Example:
        >>> import torch, speedswap
        >>> from speedswap.losses import UniformSampler, sampled_softmax
        >>> items = speedswap.Embedding(1_000_000, 16)
        >>> hidden, targets = torch.randn(32, 16, requires_grad=True), torch.randint(1_000_000, (32,))
        >>> loss = sampled_softmax(hidden, targets, items, UniformSampler(num_sampled=64, range_max=1_000_000))
        >>> loss.backward()
        >>> hidden.grad.shape
        torch.Size([32, 16])
    """
    with call_of_ranks(items):
        batch = LossBatch.of(hidden, targets, items, ignore_index, reduction)
        drawn = as_negatives(negatives)
        ids = candidates(targets, drawn, ignore_index=ignore_index)
        corrections = _corrections(drawn, targets, batch, ignore_index)
        vectors, rows = batch.hidden, items(ids)
        if bias is not None:
            vectors, rows = F.pad(vectors, (0, 1), value=1.0), torch.cat([rows, bias(ids)], 1)
    codes = ids if isinstance(ids, Tensor) else torch.from_numpy(np.unique(ids, return_inverse=True)[1])
    codes, num_targets = codes.to(rows.device), int(batch.is_target.sum())
    of_targets = wide((rows[:num_targets] * batch.at_targets(vectors)).sum(1))
    own = batch.by_sample(codes[:num_targets], 0)
    if drawn.ids is not None:
        rows, codes = rows[num_targets:], codes[num_targets:]
        if len(shape := np.shape(drawn.ids)) > 1:  # each sample has its own
            rows, codes = (_by_sample(each, shape[-1], batch) for each in (rows, codes))
    scores = wide(vectors @ rows.T if rows.dim() == 2 else torch.bmm(rows, vectors.unsqueeze(2)).squeeze(2))
    if corrections is not None:
        scores = scores - corrections.to(scores)
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if (padding_idx := getattr(items, "padding_idx", None)) is not None and getattr(items, "id_map", None) is None:
        left_out |= codes == padding_idx
    if remove_accidental_hits or drawn.ids is None:
        for target, is_there in zip(own.unbind(1), batch.is_target.unbind(1), strict=True):
            left_out |= (codes == target.unsqueeze(1)) & is_there.unsqueeze(1)
    lowest = torch.finfo(scores.dtype).min / 2  # unlike -inf it has a gradient, of 0
    of_negatives = scores.masked_fill(left_out, lowest).logsumexp(1)
    # A target that a sample has twice is one row of the softmax.
    repeats = ((own.unsqueeze(2) == own.unsqueeze(1)) & batch.is_target.unsqueeze(1)).tril(-1).any(2)
    of_own = batch.by_sample(of_targets, lowest).masked_fill(repeats, lowest).logsumexp(1)
    return batch.reduced(torch.logaddexp(of_own, of_negatives) - batch.mean_of_targets(of_targets), reduction)


def _by_sample(values: Tensor, num_sampled: int, batch: LossBatch) -> Tensor:
    """Return what belongs to each sample's own negatives, shape (n, num_sampled, …)."""
    of_all = values.view(batch.has_target.numel(), num_sampled, *values.shape[1:])
    return of_all[batch.has_target.view(-1).to(values.device)]


def _corrections(drawn: Negatives, targets: Any, batch: LossBatch, ignore_index: int | None) -> Tensor | None:
    """Check the shapes of negatives; return what to subtract from their logits, (num_sampled,) or (n, num_sampled)."""
    samples, given = tuple(batch.has_target.shape), drawn.log_expected_count
    shape = tuple(np.shape(targets if drawn.ids is None else drawn.ids))
    if drawn.ids is not None and len(shape) != 1 and shape[:-1] != samples:
        raise ValueError(f"negatives has shape {shape}; give (n,) for all samples, or {(*samples, 'n')}, some for each")
    if given is None:
        return None
    name = "log_probability" if drawn.ids is None else "log_expected_count"
    kernels.require_dense(given, name)
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; give {shape}, one for each id")
    if drawn.ids is not None:
        return given if len(shape) == 1 else _by_sample(given.reshape(-1), shape[-1], batch)
    others = (batch.is_target.sum() - batch.is_target.sum(1, keepdim=True)).clamp(min=1)
    return given[kept(targets, ignore_index).to(given.device)].to(others.device) + others.double().log()


# ---------------------------------------------------------------------- the samples of any loss


@dataclass
class LossBatch:
    """The samples that have at least one target; made by :meth:`of`.

    Attributes:
        hidden: shape (n, dim).
        is_target: bool, shape (n, most): the places of a sample's targets that are not ignored.
        has_target: bool, shape of the samples as given: these samples among all.
    """

    hidden: Tensor
    is_target: Tensor
    has_target: Tensor

    @classmethod
    def of(cls, hidden: Tensor, targets: Any, items: Any, ignore_index: int | None, reduction: str) -> LossBatch:
        """Check the arguments of a loss, and leave out samples without a target.

        Args:
            hidden: shape (*samples, dim).
            targets: shape (*samples,) or (*samples, most), ids or keys.
            items: the rows; ``embedding_dim`` is compared, if it has one.
            ignore_index: marks places without a target; None for no such mark.
            reduction: ``"mean"``, ``"sum"`` or ``"none"``.

        Raises:
            TypeError, ValueError: a dtype, shape or the reduction does not fit.
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}; choose mean, sum or none")
        kernels.require_dense(hidden, "hidden")
        require_ids("targets", targets)
        dim, samples, shape = getattr(items, "embedding_dim", None), hidden.shape[:-1], torch.Size(np.shape(targets))
        if not hidden.is_floating_point() or not hidden.dim() or dim not in (None, hidden.shape[-1]):
            wanted = f"floating-point vectors, (*samples, {dim or 'dim'}), as wide as the rows"
            raise ValueError(f"hidden has shape {tuple(hidden.shape)} and dtype {hidden.dtype}; give {wanted}")
        if shape[: len(samples)] != samples or len(shape) > len(samples) + 1:
            wanted = f"one target per sample, {tuple(samples)}, or several, {(*samples, 'n')}"
            raise ValueError(f"targets has shape {tuple(shape)}, but hidden {tuple(hidden.shape)}; give {wanted}")
        is_target = kept(targets, ignore_index).to(hidden.device).reshape(samples.numel(), (*shape, 1)[len(samples)])
        has_target = is_target.any(1)
        flat = hidden.reshape(samples.numel(), hidden.shape[-1])
        if not bool(has_target.all()):
            flat, is_target = flat[has_target], is_target[has_target]
        return cls(flat, is_target, has_target.view(samples))

    def at_targets(self, values: Tensor) -> Tensor:
        """Repeat values of samples, shape (n, …), for each of their targets."""
        return values if self.is_target.shape[1] == 1 else values[self.is_target.nonzero()[:, 0]]

    def by_sample(self, values: Tensor, fill: float) -> Tensor:
        """Arrange values of targets, shape (targets,), by sample: shape (n, most)."""
        return values.new_full(self.is_target.shape, fill).masked_scatter(self.is_target, values)

    def mean_of_targets(self, values: Tensor) -> Tensor:
        """Return the mean over each sample's targets, shape (n,), of values of targets, shape (targets,)."""
        return self.by_sample(values, 0.0).sum(1) / self.is_target.sum(1)

    def reduced(self, losses: Tensor, reduction: str) -> Tensor:
        """Reduce the losses of the samples, shape (n,); samples without a target have none, and their mean is 0."""
        if reduction == "none":
            return losses.new_zeros(self.has_target.shape).masked_scatter(self.has_target, losses)
        return losses.sum() if reduction == "sum" else losses.sum() / max(1, len(losses))


def kept(targets: Any, ignore_index: int | None) -> Tensor:
    """Return a mask, of the targets' shape, of those that are not ignored."""
    if isinstance(targets, Tensor) and ignore_index is not None:
        require_kind("ignore_index", ignore_index, Real, "one number, or None")
        return targets != ignore_index
    return torch.ones(np.shape(targets), dtype=torch.bool)


def wide(scores: Tensor) -> Tensor:
    """Return scores in a dtype in which exponentials may be summed: not in half precision."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def call_of_ranks(items: Any) -> AbstractContextManager[None]:
    """Surround a call that all ranks that own the rows make: an error in it becomes a PeerError on the others."""
    ranks = getattr(items, "ranks", None)
    return nullcontext() if ranks is None else ranks.call()

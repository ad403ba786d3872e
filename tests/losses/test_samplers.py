"""Negatives: drawn as often as their samplers say, and what the samplers say is a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from speedswap.losses import LogUniformSampler, UniformSampler, UnigramSampler

COUNTS = torch.tensor([5, 0, 1, 30, 2, 0])
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda drawn: UniformSampler(drawn, 7),
    "log-uniform": lambda drawn: LogUniformSampler(drawn, 7),
    "log-uniform over one id": lambda drawn: LogUniformSampler(drawn, 1),
    "unigram": lambda drawn: UnigramSampler(drawn, COUNTS),
    "distorted": lambda drawn: UnigramSampler(drawn, COUNTS.float(), distortion=0.75),
    "flat": lambda drawn: UnigramSampler(drawn, COUNTS, distortion=0),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_ids_are_drawn_as_often_as_expected(name: str) -> None:
    """Every id's count is within five standard deviations of its expectation."""
    drawn = 20_000
    sampler = SAMPLERS[name](drawn)
    negatives = sampler.sample()
    probability = sampler.log_probability(torch.arange(sampler.range_max)).exp()
    counts = torch.bincount(negatives.ids, minlength=sampler.range_max)
    assert math.isclose(probability.sum(), 1, rel_tol=1e-12)
    assert len(counts) == sampler.range_max
    assert ((counts - drawn * probability).abs() <= 5 * (drawn * probability).sqrt()).all()
    torch.testing.assert_close(negatives.log_expected_count.exp(), drawn * probability[negatives.ids])


def test_probabilities_are_those_of_their_formulas() -> None:
    ids = torch.arange(4)
    log_uniform = [(math.log(k + 2) - math.log(k + 1)) / math.log(5) for k in range(4)]
    assert LogUniformSampler(1, 4).log_probability(ids).exp().tolist() == pytest.approx(log_uniform, rel=1e-12)
    found = UnigramSampler(1, torch.tensor([16, 1, 0, 81]), distortion=0.75).log_probability(ids)
    assert found.exp().tolist() == pytest.approx([8 / 36, 1 / 36, 0, 27 / 36], rel=1e-12)


def test_rare_ids_of_large_ranges_keep_their_probability() -> None:
    """The last of ten million ids, by numbers computed with more digits than float64 has after a subtraction."""
    last = LogUniformSampler(1, 10**7).log_probability(torch.tensor([10**7 - 1]))
    assert last.exp().item() == pytest.approx(math.log1p(1e-7) / math.log(10**7 + 1), rel=1e-14)


@pytest.mark.parametrize("name", SAMPLERS)
def test_shape_and_generator(name: str) -> None:
    sampler = SAMPLERS[name](3)
    first, second = (sampler.sample((2, 5), generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.ids.shape == first.log_expected_count.shape == (2, 5, 3)
    assert first.ids.dtype == torch.int64
    assert torch.equal(first.ids, second.ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UniformSampler(0, 5), r"num_sampled is 0; give a whole number of at least 1"),
        (lambda: LogUniformSampler(5, 0), r"range_max is 0"),
        (lambda: UnigramSampler(5, torch.zeros(3)), r"unigrams has frequencies from 0 to 0.*some positive"),
        (lambda: UnigramSampler(5, torch.tensor([3, -1])), r"unigrams has frequencies from -1 to 3"),
        (lambda: UnigramSampler(5, torch.tensor([3, math.nan])), r"unigrams has frequencies from nan"),
        (lambda: UnigramSampler(5, torch.ones(3, 2)), r"unigrams has shape \(3, 2\); give one frequency per id"),
    ],
)
def test_settings_that_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

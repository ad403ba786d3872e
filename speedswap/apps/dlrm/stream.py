"""The stream of a run: generated samples, batches to train on, in order, and samples set apart to test on."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from speedswap.apps.dlrm.criteo import CATEGORIES, INTEGERS, MISSING, SampleFiles, SamplePosition, Samples, find_files
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.errors import SamplesError, named
from speedswap.apps.ranks import Job

BLOCK = 4096
"""Samples made at once."""
FEWEST_IDS = 10
HEAD = 10.0
"""The most popular ids differ little: 1 / (place + 10), by Zipf and Mandelbrot."""
ARRIVAL = 100
"""Samples from one new id of a column to the next."""
MOVING = 13
"""From this column on, every second one is of things that come and go: the newest is the most popular."""
MISSING_SHARE = 0.05
RANK = 2
PAIRS = ((0, 9), (2, 7), (3, 12), (4, 15), (6, 11), (8, 1))
"""Columns whose ids act on each other: by the dot product of two vectors of ``RANK`` numbers."""
OF_ID, OF_PAIR, OF_INTEGER = 0.45, 0.8, 0.4
"""Weights of a single id, of a pair's dot product, and of an integer's logarithm."""
BIAS = -1.8
KEY_BITS = np.uint64(32)

Numbers = NDArray[np.int64]


class GeneratedSamples:
    """Samples whose labels depend on single ids, on pairs of ids and on the integers, by planted weights.

    Column c of 26 has 10 ids at first and ``ids`` at last, drawn by popularity; every second one of the large columns
    gains an id per hundred samples, which is its most popular one for a while. A category is missing in a twentieth of
    the samples. About a third of the labels are 1.

    Sample n is a function of (seed, ids, n) alone: memory holds 4,096 of them, whatever the number.

    Args:
        count: their number.
        ids: ids of the largest column.
        seed: of everything.

    >>> some = GeneratedSamples(1_000, ids=100, seed=0).read(3)
    >>> some.labels.shape, some.integers.shape, some.ids.shape
    (torch.Size([3]), torch.Size([13, 3]), torch.Size([26, 3]))
    """

    def __init__(self, count: int, *, ids: int = 100_000, seed: int = 0) -> None:
        self.total = count
        """Samples in all."""
        self.done = 0
        """Samples read."""
        growth = (ids / FEWEST_IDS) ** (1 / (CATEGORIES - 1))
        self._sizes = (FEWEST_IDS * growth ** np.arange(CATEGORIES)).round().astype(np.int64).clip(1)[:, None]
        self._seed = seed
        self._block = functools.lru_cache(maxsize=1)(self._make)

    @property
    def position(self) -> SamplePosition:
        """The place reached."""
        return SamplePosition(0, self.done, 0)

    def seek(self, position: SamplePosition) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: it is not one of these samples.
        """
        self.done = min(position.samples, self.total)
        position.require(self.position)

    def read(self, count: int) -> Samples:
        """Return the next ``count`` samples, or those that are left."""
        first, self.done = self.done, min(self.done + count, self.total)
        parts = []
        for number in range(first // BLOCK, max(first, self.done - 1) // BLOCK + 1):
            start = number * BLOCK
            parts.append(self._block(number).take(slice(max(first - start, 0), self.done - start)))
        return Samples(*(torch.cat(same, dim=-1) for same in zip(*parts, strict=True)))

    def _make(self, number: int) -> Samples:
        rng = np.random.default_rng([self._seed, number])
        normal = rng.standard_normal((INTEGERS, BLOCK), dtype=np.float32)
        integers = np.floor(np.exp(1 + 1.2 * normal)).astype(np.int64) - 1
        score = BIAS + OF_INTEGER * (normal * uniform(np.arange(INTEGERS), self._seed, 1)[:, None]).sum(axis=0)
        places = (HEAD * np.expm1(rng.random((CATEGORIES, BLOCK)) * np.log1p(self._sizes / HEAD))).astype(np.int64)
        places = np.minimum(places, self._sizes - 1)  # against rounding
        moving = slice(MOVING, None, 2)
        newest = self._sizes[moving] - 1 + np.arange(number * BLOCK, (number + 1) * BLOCK) // ARRIVAL
        places[moving] = newest - places[moving]
        places[rng.random(places.shape) < MISSING_SHARE] = MISSING
        keys = places + (np.arange(1, CATEGORIES + 1) << 40)[:, None]
        score += OF_ID * uniform(keys, self._seed, 2).sum(axis=0)
        for one, other in PAIRS:
            for rank in range(RANK):
                score += OF_PAIR * uniform(keys[one], self._seed, 3 + rank) * uniform(keys[other], self._seed, 3 + rank)
        labels = rng.random(BLOCK) < 1 / (1 + np.exp(-score))
        ids = np.where(places == MISSING, MISSING, (mixed(keys, 0) >> KEY_BITS).astype(np.int64))
        return Samples(*map(torch.from_numpy, (labels.astype(np.float32), integers, ids)))


def mixed(keys: Numbers, stream: int) -> NDArray[np.uint64]:
    """Return 64 bits per key, by the finalizer of SplitMix64 (Steele et al. 2014); another stream has other bits."""
    bits = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream * 0xD1B54A32D192ED03 % 2**64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def uniform(keys: Numbers, seed: int, stream: int) -> NDArray[np.float32]:
    """Return a number per key, uniform with a deviation of 1: a function of key, seed and stream."""
    bits = mixed(keys, 8 * seed + stream) >> np.uint64(40)
    return (bits.astype(np.float32) / np.float32(2**23) - np.float32(1)) * np.float32(3**0.5)


TESTED_AT_ONCE = 1 << 14

SampleSource = SampleFiles | GeneratedSamples
"""Samples in an order, read from the beginning or from a position on."""


class StreamPlace(NamedTuple):
    """A place in an epoch's stream, between two batches.

    Attributes:
        read: samples read, with those set apart.
        done: the part of the source's ``total``.
    """

    read: int = 0
    done: int = 0
    position: SamplePosition = SamplePosition()


START = StreamPlace()


class ClickBatch(NamedTuple):
    """Samples of one step, or a rank's share of them.

    Attributes:
        size: samples of all shares.
        place: the place after them.
    """

    samples: Samples
    size: int
    place: StreamPlace

    def to(self, device: torch.device) -> ClickBatch:
        """Copy the samples to a device."""
        return self._replace(samples=self.samples.to(device))


class Data:
    """The samples of a run: to train on, and to test on.

    Without test files the last of every ``holdout`` samples is tested on, and not trained on.

    Args:
        settings: ``samples``, ``test``, ``holdout`` and ``test_samples``; and ``generate``, ``ids`` and ``seed``.
        job: the ranks, each of which gets its share of what all of them read.

    Raises:
        SamplesError: the first samples cannot be read, none are left to test on, or a test file is trained on.
    """

    def __init__(self, settings: DlrmSettings, job: Job | None = None) -> None:
        self._settings = settings
        self._job = job or Job()
        self._files = find_files(settings.samples)
        self._test_files = find_files(settings.test)
        require_apart(self._files, self._test_files)
        self._every = 0 if self._test_files else settings.holdout
        needed = self._every or 1
        found = self.open().read(needed).size
        if found < needed:
            raise SamplesError(
                f"samples has {found} samples, and none is set apart to test on: give more, or files to test on, or "
                f"lower {named('holdout')}"
            )
        if self._test_files and not SampleFiles(self._test_files).read(1).size:
            raise SamplesError(f"{named('test')} {', '.join(settings.test)} has no samples: give other files")

    @property
    def unit(self) -> str:
        """The unit of a source's ``total``."""
        return "B" if self._files else " samples"

    def open(self) -> SampleSource:
        """Return the source to train on, at its beginning."""
        if self._files:
            return SampleFiles(self._files)
        settings = self._settings
        return GeneratedSamples(settings.generate, ids=settings.ids, seed=settings.seed)

    def batches(self, place: StreamPlace = START) -> Iterator[ClickBatch]:
        """Yield the batches of an epoch from a place on: each of ``batch`` samples, but perhaps the last.

        Raises:
            CheckpointError: the samples before the place are others.
        """
        source, read, size, every = self.open(), place.read, self._settings.batch, self._every
        if read:
            source.seek(place.position)
        while True:
            count = size
            if every:
                train = read - read // every + size  # samples to train on, from the beginning to the batch's end
                count = train + (train - 1) // (every - 1) - read
            samples = source.read(count)
            numbers = torch.arange(read, read + samples.size)
            read += samples.size
            if every:
                samples = samples.take(numbers % every != every - 1)
            if not samples.size:
                return
            place = StreamPlace(read, source.done, source.position)
            yield ClickBatch(self._share(samples), samples.size, place)

    def tested(self) -> Iterator[Samples]:
        """Yield the samples to test on, ``test_samples`` at most, or a rank's share of them."""
        source: SampleSource = SampleFiles(self._test_files) if self._test_files else self.open()
        every, left = self._every or 1, self._settings.test_samples
        count = max(1, TESTED_AT_ONCE // every) * every  # whole groups, whose last samples are set apart
        while left and (samples := source.read(count)).size:
            samples = samples.take(slice(every - 1, every * left, every))
            left -= samples.size
            if samples.size:
                yield self._share(samples)

    def _share(self, samples: Samples) -> Samples:
        return samples.take(self._job.share(samples.size))


def require_apart(files: Sequence[Path], test_files: Sequence[Path]) -> None:
    """Raise SamplesError if a file to test on is one of those to train on, under any name."""
    trained_on = {os.path.realpath(path): path for path in files}
    for path in test_files:
        if (trained := trained_on.get(os.path.realpath(path))) is not None:
            also = "" if trained == path else f", as {trained}"
            raise SamplesError(
                f"{named('test')} {path} is also among samples{also}, and would be trained on: name it in one of them "
                "alone, with patterns for samples that leave it out"
            )

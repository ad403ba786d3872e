"""The stream of a run: batches to train on, in order, and samples set apart to test on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.generated import GeneratedSamples
from speedswap.apps.dlrm.samples import SamplePosition, Samples
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.errors import SamplesError, named
from speedswap.apps.ranks import Job

TESTED_AT_ONCE = 1 << 14

SampleSource = SampleFiles | GeneratedSamples
"""Samples in an order, read from the beginning or from a position on."""


class StreamPlace(NamedTuple):
    """A place in an epoch's stream, between two batches."""

    read: int = 0
    """Samples read, with those set apart."""
    done: int = 0
    """The part of the source's ``total``."""
    position: SamplePosition = SamplePosition()


START = StreamPlace()


class ClickBatch(NamedTuple):
    """Samples of one step, or a rank's share of them."""

    samples: Samples
    size: int
    """Samples of all shares."""
    place: StreamPlace
    """The place after them."""

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

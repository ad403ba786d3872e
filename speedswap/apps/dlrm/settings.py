"""The settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from speedswap.apps import options
from speedswap.apps.dlrm.criteo import CATEGORIES, INTEGERS
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.options import TableSettings, check_memory, check_widths, one_of, option, whole, widths
from speedswap.apps.ranks import share_of_machine

EVICTIONS = ("none", "lru", "lfu")
FLOAT_BYTES = 4


def patterns(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


@dataclass(frozen=True)
class DlrmSettings(TableSettings):
    """The samples to learn click prediction from, and how.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    # For the mean loss of a batch.
    suited_lr: ClassVar[Mapping[str, float]] = {
        "adagrad": 0.03,
        "sgd": 1.0,
        **dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 1e-3),
    }

    samples: tuple[str, ...] = option(
        (),
        "files in Criteo's format: a label, 13 integers and 26 hexadecimal categories, divided by tabs, empty where "
        "missing; plain, gzip or Parquet; also patterns such as 'day_*.gz' (default: samples are made up)",
        nargs="*",
        metavar="SAMPLES",
    )
    test: tuple[str, ...] = option(
        (), "files to test on, or patterns, separated by commas (default: see holdout)", type=patterns, metavar="FILES"
    )
    holdout: int = option(10, "without test, the last of every so many samples is set apart", check=whole(2, 100_000))
    test_samples: int = option(1_000_000, "test on so many samples at most", check=whole(1, 2**62))
    generate: int = option(500_000, "without SAMPLES, how many are made up", check=whole(1, 2**48))
    ids: int = option(
        100_000, "without SAMPLES, the different ids of the largest category at first", check=whole(1, 2**30)
    )
    dim: int = option(32, "width of a vector", check=whole(1, options.WIDEST))
    bottom: tuple[int, ...] = option(
        (64,), "hidden layers for the integers", check=check_widths, type=widths, metavar="WIDTHS"
    )
    top: tuple[int, ...] = option(
        (64, 32), "hidden layers over the dot products", check=check_widths, type=widths, metavar="WIDTHS"
    )
    capacity: int = option(100_000, "ids that each of the 26 tables has room for", check=whole(1, 2**31 - 1))
    admit_after: int = option(1, "an id gets a row when it is seen for so many times", check=whole(1, 2**31 - 1))
    evict: str = option(
        "lru",
        f"when a table is full, a new id takes the row of the one longest unseen (lru), of the rarest (lfu), or ends "
        f"the run (none): {', '.join(EVICTIONS)}",
        check=one_of(EVICTIONS),
    )
    epochs: int = options.epochs(1, "the samples")
    optimizer: str = options.optimizer("adagrad")
    batch: int = option(4096, "samples per step, of all processes together", check=whole(1, 2**31))
    evaluate_every: int | None = option(
        None,
        "steps after which to test and to save a checkpoint, beside the end of an epoch",
        check=whole(1, 2**62),
    )

    def __post_init__(self) -> None:
        for name in ("samples", "test"):
            value = getattr(self, name)
            files = (value,) if isinstance(value, str | Path) else value
            if isinstance(files, tuple | list) and all(isinstance(each, str | Path) for each in files):
                object.__setattr__(self, name, tuple(map(str, files)))
        super().__post_init__()
        if self.test and not self.samples:
            raise SettingsError(f"{named('test')} is {','.join(self.test)}, but samples is empty: give both or neither")
        options.check_layers_memory(*self.layer_widths())
        rows = 0 if self.storage in options.ON_DISK else FLOAT_BYTES * self.dim
        check_memory(
            f"{named('capacity')} {self.capacity:,} for each of {CATEGORIES} tables",
            share_of_machine(CATEGORIES * self.capacity * (24 + rows)),
            f"lower it, or give {named('storage')} disk",
        )
        check_memory(
            f"{named('batch')} {self.batch:,}",
            self.batch * CATEGORIES * (16 + 2 * FLOAT_BYTES * self.dim),
            "lower it",
        )

    def layer_widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the widths of the layers below and above, with those of their inputs and outputs."""
        vectors = 1 + CATEGORIES
        return (INTEGERS, *self.bottom, self.dim), (self.dim + vectors * (vectors - 1) // 2, *self.top, 1)

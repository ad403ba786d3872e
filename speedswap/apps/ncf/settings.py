"""The settings of a run."""

# ruff: noqa: RUF009 (each option makes a new field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from speedswap.apps import options
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.ncf.form import MISSING, check_columns
from speedswap.apps.options import TableSettings, check_memory, one_of, option, whole
from speedswap.apps.ranks import share_of_machine

MODELS = ("gmf", "mlp", "neumf")
CONSTANT_LR = ("adagrad",)
"""Optimizers whose steps shrink without a schedule."""
FLOAT_BYTES = 4


def parse_columns(text: str) -> dict[str, str]:
    """Read columns as the command line gives them: roles and names."""
    found: dict[str, str] = {}
    for part in text.split(","):
        role, equals, name = part.partition("=")
        if not equals or role.strip() in found:
            raise SettingsError(f"{named('columns')} is {text!r}: give each once, as in user=customer,item=sku,time=-")
        found[role.strip()] = name.strip()
    return found


def check_layers(name: str, layers: tuple[int, ...]) -> None:
    options.check_widths(name, layers)
    if not layers or layers[0] % 2:
        raise SettingsError(
            f"{name} is {','.join(map(str, layers))}: give widths such as 64,32,16,8, the first of them even"
        )


@dataclass(frozen=True)
class NcfSettings(TableSettings):
    """The ratings to learn preferences from, and how.

    The learning rate falls linearly to nothing over the run, except with Adagrad, whose steps shrink anyway.
    ``ratings``, ``columns`` and ``missing`` are those of ``read_split``.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    # For the mean loss of a batch.
    suited_lr: ClassVar[Mapping[str, float]] = {
        "adagrad": 0.02,
        "sgd": 1.0,
        **dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 2e-3),
    }

    ratings: Path | None = option(
        None,
        "lines of user, item, rating and time, divided by tabs, '::', ';', '|', commas or blanks, with a heading or "
        "without, or JSON lines, plain or gzip, or Parquet, as MovieLens' u.data, ratings.dat and ratings.csv "
        "(default: interactions are made up)",
        nargs="?",
        metavar="RATINGS",
    )
    users: int = option(2_000, "without RATINGS, how many users are made up", check=whole(2, 2**40))
    items: int = option(1_000, "without RATINGS, how many items are made up", check=whole(2, 2**40))
    interactions: int = option(100_000, "without RATINGS, how many interactions are made up", check=whole(1, 2**48))
    model: str = option("neumf", f"one of {', '.join(MODELS)}", check=one_of(MODELS))
    factors: int = option(32, "width of the GMF part of a row", check=whole(1, options.WIDEST))
    layers: tuple[int, ...] = option(
        (64, 32, 16, 8),
        "widths of the MLP: of both rows' parts together, then of each layer",
        check=check_layers,
        type=options.widths,
        metavar="WIDTHS",
    )
    negatives: int = option(4, "negatives for each interaction", check=whole(1, 2**31))
    epochs: int = options.epochs(20, "the interactions")
    batch: int = option(256, "interactions per step of all processes, each with its negatives", check=whole(1, 2**31))
    test_negatives: int = option(99, "items that each tested user's own is ranked among", check=whole(1, 2**31))
    test_users: int = option(50_000, "test so many users at most", check=whole(1, 2**62))
    columns: Mapping[str, str] | None = option(
        None,
        "which column is the user, item, rating or time, by its name or number, - for none: "
        "user=customer,item=sku,time=- (default: by the heading's names, such as user_id, movieId, stars, timestamp)",
        check=lambda name, value: check_columns(value),
        type=str,
        metavar="ROLE=COLUMN,…",
    )
    missing: str = option(
        "skip",
        "lines that lack a value or are malformed: skip leaves them out and counts them, error refuses them",
        check=one_of(MISSING),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            object.__setattr__(self, "columns", dict(self.columns))
        if self.columns and self.ratings is None:
            raise SettingsError(f"{named('columns')} is given, but no ratings: give a file, or leave it out")
        options.check_layers_memory(self.tower())
        if self.ratings is None:
            check_memory(
                f"{self.users:,} users, {self.items:,} items and {self.interactions:,} interactions",
                self.generated_bytes(),
                f"give fewer, or {named('storage')} disk for the tables",
            )
            self.check_step(self.interactions)

    def check_step(self, interactions: int) -> None:
        """Refuse a batch whose rows and gradients do not fit into memory, given the number of interactions."""
        rows = min(self.batch, interactions) * (1 + self.negatives)
        check_memory(
            f"batch {self.batch:,} and {self.negatives:,} negatives",
            rows * (16 + FLOAT_BYTES * sum(self.row_widths())),
            "lower one of them",
        )

    def tower(self) -> tuple[int, ...]:
        """Return the widths of the MLP, none for GMF alone."""
        return () if self.model == "gmf" else self.layers

    def row_widths(self) -> tuple[int, int]:
        """Return the numbers in a row of a table: for GMF, and for MLP."""
        return self.factors * (self.model != "mlp"), sum(self.tower()[:1]) // 2

    def generated_bytes(self) -> int:
        """Return the peak memory of generated interactions, and of the tables' weights unless in files."""
        rows = 0 if self.storage in options.ON_DISK else FLOAT_BYTES * sum(self.row_widths())
        tables = share_of_machine((self.users + self.items) * rows)
        return self.users * 24 + self.items * 40 + tables + 32 * self.interactions

    def lr_left(self, progress: float) -> float:
        """Return the share of the learning rate that is left at a point between 0 and 1 of the run."""
        return 1.0 if options.plain(self.optimizer) in CONSTANT_LR else 1 - progress

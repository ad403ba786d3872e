"""Configs of a collection's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from speedswap._words import a_kind, require_kind
from speedswap.swapping.arguments import require_id_map, row_among
from speedswap.swapping.keyed import rows_for
from speedswap.tables import IdMap, Storage
from speedswap.tables import init as initializers
from speedswap.tables.record import count, require_dtype, seed_of

_POOLINGS = ("sum", "mean", "max")
_OF_THE_RANK = ("seed", "storage", "id_map")  # may differ, or is agreed on elsewhere
Config = TypeVar("Config", bound="EmbeddingConfig")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table of a :class:`speedswap.EmbeddingCollection`.

    Tables with the same width, dtype and storage are stored consecutively in one store, and are one table for a
    training step, unless ``group`` or ``trainable`` separates them.

    Args:
        name: the table's name, which is part of its key in ``state_dict``.
        num_embeddings: number of rows, at least 1.
        embedding_dim: items per row, at least 1.
        feature_names: the features looked up in the table; by default one named like the table. Features of several
            tables are called ``feature@table`` in the collection's output.
        init: initial values, one of :mod:`speedswap.init` or a function of ``torch.nn.init``; standard normal by
            default.
        seed: of the initial values; drawn from torch's random generator by default. The rows start with the bits of a
            :class:`speedswap.Embedding` of this size and seed.
        padding_idx: a row that starts as zeros, gets no gradient, and counts in no bag.
        id_map: an :class:`speedswap.IdMap` from keys to the table's rows: then features hold keys, num_embeddings
            follows from the map, and padding_idx is 0. The collection exposes it as ``id_maps[name]``.
        dtype: the weights' dtype; torch's default dtype by default.
        storage: ``device``, ``pinned`` or ``pageable``, or the place itself, as for :class:`speedswap.Embedding`; by
            default the collection's.
        stored_dtype, state_dtype, rounding: compact columns, as for :class:`speedswap.Embedding`.
        lookup_dtype: what lookups return, as for :class:`speedswap.Embedding`.
        group: tables in different groups have different parameters, so that an optimizer can train them with different
            settings. It becomes part of a directory name.
        trainable: False freezes the rows, in a separate store of frozen tables.

    Raises:
        ValueError: a number is out of range, a name is empty or contains a dot, or a group contains a dot or a slash.

    Example:
        >>> import speedswap
        >>> speedswap.EmbeddingConfig(name="item", num_embeddings=1000, embedding_dim=16).feature_names
        ('item',)
    """

    name: str
    num_embeddings: int = 0
    embedding_dim: int
    feature_names: Sequence[str] = ()
    init: initializers.Initializer | Callable[..., Any] | None = None
    seed: int | None = None
    padding_idx: int | None = None
    id_map: IdMap | None = None
    dtype: torch.dtype | None = None
    storage: Storage | str | None = None
    stored_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    rounding: str | None = None
    lookup_dtype: torch.dtype | None = None
    group: str = ""
    trainable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ValueError(f"name is {self.name!r}; give a table's name, without a dot: it is a part of state_dict's")
        if not isinstance(self.group, str) or set(self.group) & set("./\\\0"):
            raise ValueError(f"group is {self.group!r}; give a name without dots and slashes: it is a directory's")
        if self.id_map is not None:
            require_id_map(self.id_map)
            rows = rows_for(self.id_map, self.num_embeddings or self.id_map.num_rows, self.padding_idx)
            object.__setattr__(self, "num_embeddings", rows)
            object.__setattr__(self, "padding_idx", 0)
        rows = count("num_embeddings", self.num_embeddings)
        count("embedding_dim", self.embedding_dim)
        if isinstance(self.feature_names, str):
            raise ValueError(f"feature_names is {self.feature_names!r}; give a list of names")
        require_kind("feature_names", self.feature_names, Iterable, "a list of names")
        for feature in (names := tuple(self.feature_names)):
            if not isinstance(feature, str):
                raise TypeError(
                    f"feature_names has {feature!r}, {a_kind(feature)}; give names, such as {str(feature)!r}"
                )
        object.__setattr__(self, "feature_names", names or (self.name,))
        if self.padding_idx is not None:
            own_row = row_among(f"padding_idx of table {self.name!r}", self.padding_idx, rows)
            object.__setattr__(self, "padding_idx", own_row)
        if self.seed is not None:
            object.__setattr__(self, "seed", seed_of(self.seed, f"seed of table {self.name!r}"))
        if self.dtype is not None:
            require_dtype("dtype", self.dtype)
        if self.stored_dtype == torch.int8 and self.trainable:
            raise ValueError(
                f"stored_dtype of table {self.name!r} is torch.int8, which is for lookup; give trainable=False"
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of a :class:`speedswap.EmbeddingBagCollection`.

    Args:
        pooling: ``"sum"``, ``"mean"`` or ``"max"``, or a member of TorchRec's ``PoolingType``.
        arguments: the others are those of :class:`EmbeddingConfig`.

    Example:
        >>> import speedswap
        >>> config = speedswap.EmbeddingBagConfig(
        ...     name="item", num_embeddings=1000, embedding_dim=16, feature_names=["clicked", "bought"], pooling="mean"
        ... )
    """

    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = getattr(self.pooling, "value", self.pooling)
        pooling = pooling.lower() if isinstance(pooling, str) else pooling
        if pooling not in _POOLINGS:
            raise ValueError(f'pooling of table {self.name!r} is {self.pooling!r}; choose "sum", "mean" or "max"')
        object.__setattr__(self, "pooling", pooling)


def described_alike(config: EmbeddingConfig) -> dict[str, object]:
    """Return the settings, by name, that must be equal on all ranks that own a table's rows together."""
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OF_THE_RANK}
    settings["init"] = None if config.init is None else initializers.resolve(config.init).to_json()
    return {f"{name} of table {config.name!r}": value for name, value in settings.items()}


def checked(tables: Iterable[Config], kind: type[Config]) -> tuple[Config, ...]:
    """Return a collection's configs.

    Raises:
        TypeError: a config has the wrong type.
        ValueError: there are none, or two have the same name.
    """
    if isinstance(tables, EmbeddingConfig):
        raise TypeError(f"tables is {a_kind(tables)}; give a list of them, [{type(tables).__name__}(…)]")
    if not isinstance(tables, Iterable):
        raise TypeError(f"tables is {a_kind(tables)}; give a list of speedswap.{kind.__name__} objects")
    configs = tuple(tables)
    for config in configs:
        if type(config) is not kind:
            raise TypeError(f"tables has {a_kind(config)}; give speedswap.{kind.__name__} objects")
    if not configs:
        raise ValueError(f"tables is empty; give a speedswap.{kind.__name__} for each table")
    for name, times in Counter(config.name for config in configs).items():
        if times > 1:
            raise ValueError(f"tables has {name!r} {times} times; give each table a name of its own")
    lookups = [(feature, config.name) for config in configs for feature in config.feature_names]
    named = dict(zip(lookups, output_names(lookups), strict=True))
    for name, times in Counter(named.values()).items():
        if times > 1:
            raise ValueError(
                f"{times} lookups would be called {name!r}; rename the feature that has the name of a lookup in one of "
                "several tables, feature@table"
            )
    return configs


def output_names(lookups: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of lookups in a collection's output.

    Args:
        lookups: the feature and the table of each lookup.
    """
    times = Counter(feature for feature, _ in lookups)
    return tuple(feature if times[feature] == 1 else f"{feature}@{table}" for feature, table in lookups)

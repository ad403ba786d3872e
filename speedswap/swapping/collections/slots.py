"""The lookups of a collection: which feature in which table, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.errors import IdError
from speedswap.swapping.collections.configs import EmbeddingConfig, output_names
from speedswap.swapping.collections.group import TableGroup

__all__ = ["Order", "Slots"]

_MOST_ORDERS = 64


class Order(NamedTuple):
    """The place of each slot's feature among the keys of a batch.

    Attributes:
        places: int64, shape (slots,), on the CPU.
        is_given: True if the keys are the slots' features, in their order.
    """

    places: Tensor
    is_given: bool


class Slots:
    """Pairs of a table and a feature that is looked up in it, group after group.

    Args:
        groups: of tables.
        last: tells the tables whose lookups come after the others of their group.

    Attributes:
        features: the name of each slot's feature.
        configs: each slot's table.
        bases: each table's first row in its group, int64, shape (slots,), on the CPU.
        limits: the number of its rows.
        paddings: its padding row in the group, -1 for none.
        of_group: the slots of each group.
        of_table: the slots of each table, by its name.
        names: all features.
        keys: each slot's name in an output: its feature, with its table if several tables have that.
    """

    def __init__(self, groups: Sequence[TableGroup], last: Callable[[EmbeddingConfig], bool]) -> None:
        features: list[str] = []
        configs: list[EmbeddingConfig] = []
        bases: list[int] = []
        self.of_group: list[range] = []
        self.of_table: dict[str, range] = {}
        for group in groups:
            begin = len(features)
            tables = sorted(zip(group.configs, group.first_rows, strict=True), key=lambda table: last(table[0]))
            for config, first_row in tables:
                self.of_table[config.name] = range(len(features), len(features) + len(config.feature_names))
                features += config.feature_names
                configs += [config] * len(config.feature_names)
                bases += [first_row] * len(config.feature_names)
            self.of_group.append(range(begin, len(features)))
        self.features = tuple(features)
        self.configs = tuple(configs)
        self.bases = torch.tensor(bases, dtype=torch.int64)
        self.limits = torch.tensor([config.num_embeddings for config in configs], dtype=torch.int64)
        paddings = [-1 if config.padding_idx is None else config.padding_idx for config in configs]
        self.paddings = torch.tensor([-1 if row < 0 else base + row for base, row in zip(bases, paddings, strict=True)])
        self.names = frozenset(features)
        self.keys = output_names([(name, config.name) for name, config in zip(features, configs, strict=True)])
        self._orders: dict[tuple[str, ...], Order] = {}

    def __len__(self) -> int:
        return len(self.features)

    def in_order_of(self, configs: Sequence[EmbeddingConfig]) -> list[int]:
        """Return the slots table after table."""
        places = {config.name: place for place, config in enumerate(configs)}
        return sorted(range(len(self)), key=lambda slot: places[self.configs[slot].name])

    def require_features(self, names: Sequence[str]) -> None:
        """Raise ValueError unless these are the collection's features."""
        for name in sorted(self.names.difference(names)):
            raise ValueError(f"feature {name!r} is missing; give the ids of {', '.join(sorted(self.names))}")
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"feature {name!r} is looked up in no table; there are {', '.join(sorted(self.names))}: leave it "
                    "out (of a KeyedJaggedTensor with permute), or name it in a table's feature_names"
                )

    def order(self, keys: tuple[str, ...]) -> Order:
        """Return the places of the slots' features among keys.

        Raises:
            ValueError: a feature is missing, or a key is not a feature, or there twice.
        """
        order = self._orders.get(keys)
        if order is None:
            self.require_features(keys)
            if len(set(keys)) < len(keys):
                raise ValueError(f"the keys are {', '.join(keys)}, one of them twice; give each feature once")
            place = {key: index for index, key in enumerate(keys)}
            with torch.inference_mode(False):  # used later in other modes
                order = Order(torch.tensor([place[name] for name in self.features]), keys == self.features)
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            self._orders[keys] = order
        return order

    def outside(self, slot: int, where: str, value: int) -> IdError:
        """Return the error for an id that is not a row of its table."""
        config = self.configs[slot]
        return IdError(
            f"{where} of feature {self.features[slot]!r} is {value}, but table {config.name!r} has rows 0 to "
            f"{config.num_embeddings - 1}; map unknown ids to a padding row (padding_idx=) before the lookup"
        )

"""Lookups in several tables at once, with one row per id or pooled."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from speedswap.swapping.collections.collection import TableCollection
from speedswap.swapping.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedTensor
from speedswap.swapping.collections.pooling import PooledColumns
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.lookup import look_up


class EmbeddingCollection(TableCollection[EmbeddingConfig]):
    """Lookups in several tables at once, with TorchRec's names.

    Tables of one width, dtype and storage lie in one store, each in its own range of rows. A step checks, sorts,
    gathers, trains and scatters their rows together, whatever the number of tables. Optimizers, ``attach``,
    ``lookahead``, the splitter and ``state_dict`` work as with a :class:`speedswap.Embedding` for each table, and the
    results are the same, bit for bit.

    Args:
        tables: a config for each.
        device: of the parameters, as ``.to(device)`` would set it; rows go to the device of the ids.
        storage: of the tables whose config has none, as for :class:`speedswap.Embedding`. A directory gets a
            subdirectory for each group of tables, each with its own cache; :meth:`open` opens it again.
        path: a directory for tables on disk, for short.

    Attributes:
        embeddings: the tables by name: ``embeddings["item"].read(ids)``, ``.score(queries)``, ``.weight`` to be filled
            in place; each is an entry of ``state_dict``.
        groups: the tables of one store each, with the ``weight`` that an optimizer trains.

    Shape:
        features, one of:

        - a mapping from every feature to its ids, int32 or int64: (batch,), one for each sample; (batch, n), filled up
          with the table's ``padding_idx``; (ids, offsets), as ``nn.EmbeddingBag`` has them without
          ``include_last_offset``; or a jagged tensor, of torch.nested or with the methods of TorchRec's;
        - a ``KeyedJaggedTensor``, TorchRec's or :class:`speedswap.KeyedJaggedTensor`, of these features.

        → a dict from each feature to a :class:`speedswap.JaggedTensor` with ``values()`` of shape (ids, embedding_dim).

    Raises:
        IdError: in the forward pass, for an id outside of its table. Nothing was read.
        ValueError, TypeError: in the forward pass, for a feature that is missing, unknown or does not fit.
        LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.

    Example:
        >>> import torch, speedswap
        >>> user = speedswap.EmbeddingConfig(name="user", num_embeddings=100, embedding_dim=8)
        >>> page = speedswap.EmbeddingConfig(
        ...     name="page", num_embeddings=500, embedding_dim=8, feature_names=["seen", "liked"]
        ... )
        >>> tables = speedswap.EmbeddingCollection([user, page])
        >>> optimizer = torch.optim.Adam(tables.parameters())
        >>> found = tables(
        ...     {
        ...         "user": torch.tensor([7, 99]),
        ...         "seen": torch.tensor([[4, 5, 6], [400, 401, 402]]),
        ...         "liked": (torch.tensor([5]), torch.tensor([0, 1])),
        ...     }
        ... )
        >>> found["seen"].to_padded_dense().shape, found["liked"].lengths().tolist()
        (torch.Size([2, 3, 8]), [1, 0])
    """

    config_type = EmbeddingConfig
    module_types = (nn.Embedding,)
    tables_name = "embeddings"

    @outside_graphs
    def forward(self, features: Mapping[str, Any] | Any) -> dict[str, JaggedTensor]:
        """Look all features up; the arguments' shapes and the errors are those of the class."""
        return self._of_one_commit(self._looked_up, features)

    def _looked_up(self, features: Any) -> dict[str, JaggedTensor]:
        found = self._given(features)
        slots = found.slots
        lengths = found.offsets.diff().view(len(slots), found.stride).unbind(0)
        results: dict[str, JaggedTensor] = {}
        for index, some in enumerate(slots.of_group):
            weight, local = self._look_up(found, index)
            counts = [stop - start for start, stop in pairwise(found.starts[some.start : some.stop + 1])]
            vectors = look_up(weight, local).split_with_sizes(counts)
            for own, slot in zip(vectors, some, strict=True):
                results[slots.keys[slot]] = JaggedTensor(own, lengths=lengths[slot])
        return (
            results
            if len(slots.groups) == 1
            else {slots.keys[slot]: results[slots.keys[slot]] for slot in slots.in_order_of(self.configs)}
        )

    def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
        """Return the description of each table."""
        return self.configs


class EmbeddingBagCollection(TableCollection[EmbeddingBagConfig]):
    """Sums, means or maxima over bags of rows of several tables at once, with TorchRec's names.

    Tables of one width, dtype and storage lie in one store, each in its own range of rows. A step checks, sorts,
    gathers, trains and scatters their rows together, whatever the number of tables. Optimizers, ``attach``,
    ``lookahead``, the splitter and ``state_dict`` work as with a :class:`speedswap.EmbeddingBag` for each table, and
    the results are the same, bit for bit.

    Args:
        tables: a config for each.
        is_weighted: True if every id is given with a weight, for tables with pooling ``"sum"``.
        device: of the parameters, as ``.to(device)`` would set it; rows go to the device of the ids.
        storage: of the tables whose config has none, as for :class:`speedswap.Embedding`. A directory gets a
            subdirectory for each group of tables, each with its own cache; :meth:`open` opens it again.
        path: a directory for tables on disk, for short.

    Attributes:
        embedding_bags: the tables by name: ``embedding_bags["item"].read(ids)``, ``.score(queries)``, ``.weight`` to be
            filled in place; each is an entry of ``state_dict``.
        groups: the tables of one store each, with the ``weight`` that an optimizer trains.

    Shape:
        features, one of:

        - a mapping from every feature to its ids, int32 or int64: (batch,), one for each sample; (batch, n), filled up
          with the table's ``padding_idx``; (ids, offsets) or (ids, offsets, weights), as ``nn.EmbeddingBag`` has them
          without ``include_last_offset``, or (ids, None, weights), as these; or a jagged tensor, of torch.nested
          or with the methods of TorchRec's;
        - a ``KeyedJaggedTensor``, TorchRec's or :class:`speedswap.KeyedJaggedTensor`, of these features.

        → a :class:`speedswap.KeyedTensor` with values of shape (batch, sum of the features' widths), table after table;
        zeros for a bag without ids.

    Raises:
        IdError: in the forward pass, for an id outside of its table. Nothing was read.
        ValueError, TypeError: in the forward pass, for a feature that is missing, unknown or does not fit.
        LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.

    Example:
        >>> import torch, speedswap
        >>> user = speedswap.EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=8)
        >>> page = speedswap.EmbeddingBagConfig(
        ...     name="page", num_embeddings=500, embedding_dim=8, feature_names=["seen", "liked"], pooling="mean"
        ... )
        >>> tables = speedswap.EmbeddingBagCollection([user, page])
        >>> optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
        >>> pooled = tables(
        ...     {
        ...         "user": torch.tensor([7, 99]),
        ...         "seen": torch.tensor([[4, 5, 6], [400, 401, 402]]),
        ...         "liked": (torch.tensor([5]), torch.tensor([0, 1])),
        ...     }
        ... )
        >>> pooled.keys(), pooled.values().shape, pooled["liked"].shape
        (['user', 'seen', 'liked'], torch.Size([2, 24]), torch.Size([2, 8]))
    """

    config_type = EmbeddingBagConfig
    module_types = (nn.EmbeddingBag, nn.Embedding)
    tables_name = "embedding_bags"

    @functools.cached_property
    def _columns(self) -> PooledColumns:
        with torch.device("cpu"), torch.inference_mode(False):  # used later in other modes
            return PooledColumns(self._slots, self.configs)

    @outside_graphs
    def forward(self, features: Mapping[str, Any] | Any) -> KeyedTensor:
        """Pool all features; the arguments' shapes and the errors are those of the class."""
        return self._of_one_commit(self._pooled, features)

    def _pooled(self, features: Any) -> KeyedTensor:
        found, columns = self._given(features), self._columns
        gathered = [self._look_up(found, index) for index in range(len(found.slots.groups))]
        pooled = [each.pooled(found, *gathered[each.group]) for each in columns.passes]
        return KeyedTensor(columns.keys, columns.widths, columns.joined(pooled))

    def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
        """Return the description of each table."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether every id has a weight."""
        return self._is_weighted

"""Lists of different lengths, of one feature or of several, and pooled vectors: what collections take and return.

Features may also be given as a mapping of tensors, bags and jagged tensors, or as TorchRec's keyed jagged tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind, require_kind
from speedswap.tables import is_single_key

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_Self = TypeVar("_Self", bound="_Jagged")


class _Jagged:
    """Values in segments, with lengths or offsets; the missing one is computed on demand."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise ValueError("lengths and offsets are None; give one of them")
        for name, given in (("values", values), ("weights", weights), ("lengths", lengths), ("offsets", offsets)):
            if not isinstance(given, Tensor) and (given is not None or name == "values"):
                require_kind(name, given, Tensor, "a tensor")
        for name, given in (("lengths", lengths), ("offsets", offsets)):
            if given is not None and given.dtype not in _INTEGERS and given.numel():
                raise TypeError(f"{name} has dtype {given.dtype}; give integers")
        if weights is not None and len(weights) != len(values):
            raise ValueError(f"weights has {len(weights)} items, but there are {len(values)} values; give one of each")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    def values(self) -> Tensor:
        """Return the values of all segments, one after the other."""
        return self._values

    def weights(self) -> Tensor:
        """Return a weight per value.

        Raises:
            ValueError: there are no weights.
        """
        if self._weights is None:
            raise ValueError("weights is None; give weights when it is made, or ask weights_or_none()")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return a weight per value; None if there are none."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values in each segment."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the position of each segment's first value, and the number of values."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def to(self: _Self, device: torch.device | str, non_blocking: bool = False) -> _Self:
        """Return the same lists on another device."""
        return self._moved(lambda each: each.to(device, non_blocking=non_blocking))

    def pin_memory(self: _Self) -> _Self:
        """Return the same lists in pinned memory, as a ``DataLoader`` with ``pin_memory=True`` asks for."""
        return self._moved(Tensor.pin_memory)

    def _moved(self: _Self, move: Callable[[Tensor], Tensor]) -> _Self:
        moved = copy.copy(self)
        vars(moved).update({name: move(each) for name, each in vars(self).items() if isinstance(each, Tensor)})
        return moved


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets of segments, int64, from their lengths."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths.reshape(-1), 0, out=offsets[1:])
    return offsets


class JaggedTensor(_Jagged):
    """A list of values per sample, of one feature, with the methods of TorchRec's ``JaggedTensor``.

    Args:
        values: all samples' values, one after the other: shape (count,), or (count, dim).
        weights: one per value.
        lengths: values of each sample, shape (batch,).
        offsets: position of each sample's first value, and count: shape (batch + 1,).

    Example:
        >>> import torch, speedswap
        >>> words = speedswap.JaggedTensor(torch.tensor([5, 6, 7]), lengths=torch.tensor([2, 0, 1]))
        >>> words.offsets().tolist()
        [0, 2, 2, 3]
        >>> words.to_padded_dense(padding_value=-1).tolist()
        [[5, 6], [-1, -1], [7, -1]]
    """

    def to_dense(self) -> list[Tensor]:
        """Return the values of each sample, as views. On a GPU this waits for the lengths."""
        return list(torch.split(self._values, self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return the values with one row per sample.

        Args:
            desired_length: values of each row, cut off or padded; by default those of the longest sample.
            padding_value: the value that fills up a row.

        Returns:
            Shape (batch, desired_length), or (batch, desired_length, dim).
        """
        lengths, offsets = self.lengths().long(), self.offsets().long()
        if desired_length is None:
            desired_length = int(lengths.max()) if len(lengths) else 0
        columns = torch.arange(desired_length, device=lengths.device)
        is_value = columns < lengths.unsqueeze(1)
        places = torch.where(is_value, offsets[:-1].unsqueeze(1) + columns, 0)
        if not len(self._values):
            return self._values.new_full((*places.shape, *self._values.shape[1:]), padding_value)
        mask = is_value.view(*is_value.shape, *[1] * (self._values.ndim - 1))
        return torch.where(mask, self._values[places], padding_value).to(self._values.dtype)

    def __repr__(self) -> str:
        return f"JaggedTensor(values of shape {tuple(self._values.shape)}, lengths {self.lengths().tolist()})"


class KeyedJaggedTensor(_Jagged):
    """A list of ids per key and sample, with the methods of TorchRec's ``KeyedJaggedTensor``.

    Args:
        keys: names of the features.
        values: all ids, key after key, and sample after sample within a key: shape (count,).
        weights: one per id.
        lengths: ids of each list, key after key: shape (keys · stride,).
        offsets: position of each list's first id, and count: shape (keys · stride + 1,).
        stride: samples; needed only if there is no key.

    Attributes:
        is_checked: True if the offsets are known to ascend to the number of ids.

    Raises:
        ValueError: the sizes are inconsistent.

    Example:
        >>> import torch, speedswap
        >>> batch = speedswap.KeyedJaggedTensor.from_lengths_sync(
        ...     keys=["user", "words"], values=torch.tensor([3, 4, 70, 71, 72]), lengths=torch.tensor([1, 1, 0, 3])
        ... )
        >>> batch.stride(), batch["words"].to_dense()
        (2, [tensor([], dtype=torch.int64), tensor([70, 71, 72])])
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        segments = lengths.numel() if lengths is not None else len(offsets) - 1 if offsets is not None else 0
        if stride is None:
            if segments % max(len(self._keys), 1):
                raise ValueError(
                    f"there are {len(self._keys)} keys and {segments} lists; give one for each key and sample"
                )
            stride = segments // max(len(self._keys), 1)
        elif segments != stride * len(self._keys):
            raise ValueError(f"there are {len(self._keys)} keys and {segments} lists, but stride is {stride}")
        self._stride = stride
        self._offset_per_key: list[int] | None = None
        self.is_checked = False

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Return one with these lengths, as TorchRec's method of this name does."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Return one with these offsets, as TorchRec's method of this name does."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return one with the lists of each key, for example from :meth:`to_dict`.

        Raises:
            ValueError: some have weights, or samples, that others do not have.
        """
        require_kind("jt_dict", jt_dict, Mapping, "a jagged tensor for each key")
        every = jt_dict.items()
        return cls.concat([cls([key], each.values(), each.weights_or_none(), each.lengths()) for key, each in every])

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Return one without keys or samples."""
        values, weights, lengths = (
            torch.empty(0, dtype=dtype, device=device) for dtype in (values_dtype, weights_dtype, lengths_dtype)
        )
        return cls([], values, weights if is_weighted else None, lengths)

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Return one with the keys of several, which must have the same number of samples.

        Raises:
            ValueError: the list is empty, or some have weights, or samples, that others do not have.
        """
        if not kjt_list:
            raise ValueError("kjt_list is empty; give at least one")
        strides = [each.stride() for each in kjt_list]
        weights = [each._weights for each in kjt_list if each._weights is not None]
        if len({*strides}) > 1:
            raise ValueError(f"kjt_list has {strides} samples; give each as many")
        if 0 < len(weights) < len(kjt_list):
            raise ValueError("kjt_list is partly without weights; give all of them weights, or none")
        return cls(
            [key for each in kjt_list for key in each._keys],
            torch.cat([each.values() for each in kjt_list]),
            torch.cat(weights) if weights else None,
            torch.cat([each.lengths().reshape(-1) for each in kjt_list]),
            stride=strides[0],
        )

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Return the keys in groups, as views, in their order. On a GPU this waits for the offsets.

        Args:
            segments: the number of keys in each group; together all keys.

        Raises:
            ValueError: they do not add up to all keys.
        """
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise ValueError(
                f"segments is {list(segments)}, but there are {len(self._keys)} keys; give each to a group"
            )
        bounds = pairwise([0, *accumulate(segments)])
        return [KeyedJaggedTensor(self._keys[a:b], *self._between(a, b), stride=self._stride) for a, b in bounds]

    def _between(self, begin: int, end: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return values, weights and lengths of some consecutive keys."""
        some = slice(self.offset_per_key()[begin], self.offset_per_key()[end])
        lengths = self.lengths().reshape(-1)[begin * self._stride : end * self._stride]
        return self._values[some], None if self._weights is None else self._weights[some], lengths

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def stride(self) -> int:
        """Return the number of samples."""
        return self._stride

    def offset_per_key(self) -> list[int]:
        """Return the position of each key's first id, and the number of ids. On a GPU this waits for the offsets."""
        if self._offset_per_key is None:
            firsts = self.offsets()[:: self._stride].tolist() if self._stride else [0] * (len(self._keys) + 1)
            self._offset_per_key = firsts
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """Return the number of each key's ids. On a GPU this waits for the offsets."""
        return [stop - start for start, stop in pairwise(self.offset_per_key())]

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the lists of one key.

        Raises:
            KeyError: there is no such key.
        """
        if key not in self._keys:
            raise KeyError(f"{key!r} is not a key; there are {', '.join(self._keys)}")
        index = self._keys.index(key)
        return JaggedTensor(*self._between(index, index + 1))

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the lists of each key."""
        return {key: JaggedTensor(*self._between(index, index + 1)) for index, key in enumerate(self._keys)}

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """Return some of the keys, in a given order, by their indices in ``keys()``."""
        offsets = self.offset_per_key()
        pieces = [slice(offsets[index], offsets[index + 1]) for index in indices]
        lengths = self.lengths().reshape(len(self._keys), self._stride)[list(indices)].reshape(-1)
        weights = None if self._weights is None else torch.cat([self._weights[piece] for piece in pieces])
        values = torch.cat([self._values[piece] for piece in pieces])
        return KeyedJaggedTensor([self._keys[index] for index in indices], values, weights, lengths)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        if self._values.device.type == "cpu":  # so that a GPU is not waited for
            known = self.offsets()
            ascend = int(known[0]) == 0 and bool((known[1:] >= known[:-1]).all())
            self.is_checked = ascend and int(known[-1]) == len(self._values)
            self.offset_per_key()
        return super()._moved(move)

    def __repr__(self) -> str:
        lists = {key: each.to_dense() for key, each in self.to_dict().items()}
        return f"KeyedJaggedTensor({lists})"


class KeyedTensor:
    """One matrix whose columns belong to keys, with the methods of TorchRec's ``KeyedTensor``.

    Args:
        keys: names, in the order of the columns.
        length_per_key: columns of each.
        values: shape (batch, sum of the lengths).

    Example:
        >>> import torch, speedswap
        >>> pooled = speedswap.KeyedTensor(["user", "item"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["item"]
        tensor([[3.]])
        >>> {key: value.tolist() for key, value in pooled.to_dict().items()}
        {'user': [[1.0, 2.0]], 'item': [[3.0]]}
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        require_kind("values", values, Tensor, "a matrix")
        if len(keys) != len(length_per_key) or values.ndim != 2 or values.shape[1] != sum(length_per_key):
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but {len(keys)} keys have {len(length_per_key)} lengths, "
                f"{sum(length_per_key)} in all; give a matrix with that many columns"
            )
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values

    def keys(self) -> list[str]:
        """Return the keys, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """Return all columns, shape (batch, sum of the lengths)."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the keys lie: 1."""
        return 1

    def length_per_key(self) -> list[int]:
        """Return the columns of each key."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return the first column of each key, and the number of all."""
        return [0, *accumulate(self._lengths)]

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        """Return a key's columns, a view of shape (batch, length).

        Raises:
            KeyError: there is no such key.
        """
        if key not in self._parts:
            raise KeyError(f"{key!r} is not a key; there are {', '.join(self._keys)}")
        return self._parts[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Return each key's columns, as views."""
        return dict(self._parts)

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        parts = torch.split(self._values, self._lengths, dim=1)  # one node of a graph for all
        return dict(zip(self._keys, parts, strict=True))

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return the columns of some keys side by side, for each group of keys.

        Args:
            keyed_tensors: each key is taken from the first of them that has it.
            groups: keys, in the order wanted.

        Raises:
            KeyError: no tensor has a key.
        """
        found: dict[str, Tensor] = {}
        for each in reversed(keyed_tensors):
            found |= each.to_dict()
        for key in chain(*groups):
            if key not in found:
                raise KeyError(f"groups has {key!r}, which is not a key; there are {', '.join(found)}")
        return [torch.cat([found[key] for key in group], dim=1) for group in groups]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Return the same keys with values on another device."""
        return KeyedTensor(self._keys, self._lengths, self._values.to(device, non_blocking=non_blocking))

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}: {length}" for key, length in zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({{{keys}}}, values of shape {tuple(self._values.shape)})"


# ---------------------------------------------------------------------- features as they are given


class KeyedFeatures(NamedTuple):
    """The features of a keyed jagged tensor, speedswap's or TorchRec's.

    Attributes:
        keys: their names.
        stride: the number of bags per feature.
        ids: the ids, or keys, of all features.
        read_bags: returns each bag's first id, and the number of ids; or each bag's number of ids.
        has_offsets: True for the former.
        weights: one per id, or None.
        offset_per_key: each feature's first id, and the number of ids; None unless the offsets are known to ascend.
    """

    keys: list[str]
    stride: int
    ids: Any
    read_bags: Callable[[], Tensor]
    has_offsets: bool
    weights: Tensor | None
    offset_per_key: list[int] | None

    def offsets(self) -> Tensor:
        """Return each bag's first id, and the number of ids."""
        return self.read_bags() if self.has_offsets else offsets_of(self.read_bags())

    def checked_offsets(self, name: str) -> Tensor:
        """Return the offsets, without checking that they ascend.

        Raises:
            ValueError: there is no bag for each feature and sample; the message has the name.
        """
        offsets = self.offsets()
        bags, device = len(offsets) - 1, offsets.device
        if self.ids.ndim != 1:
            raise ValueError(f"{name}.values() has shape {tuple(self.ids.shape)}; it must have one dimension")
        if bags != len(self.keys) * self.stride or device != self.ids.device:
            raise ValueError(
                f"{name} has {len(self.keys)} keys and a stride of {self.stride}, but {bags} bags, on {device}; there "
                f"must be a bag for each key and sample, on {self.ids.device}"
            )
        return offsets

    def by_key(self) -> Mapping[str, Any]:
        """Return a jagged tensor per feature."""
        return KeyedJaggedTensor(self.keys, self.ids, self.weights, None, self.offsets(), self.stride).to_dict()


def at_door(given: Any) -> Mapping[str, Any] | KeyedFeatures:
    """Return features as a mapping, unread, or what a keyed jagged tensor holds.

    Raises:
        TypeError, ValueError: as :func:`keyed_features` does.
    """
    if isinstance(given, Mapping):
        return given
    return keyed_features("features", given, "a mapping from each feature to its ids")


def keyed_features(name: str, given: Any, others: str) -> KeyedFeatures:
    """Return what an object with the methods of TorchRec's KeyedJaggedTensor holds.

    Args:
        name: of the argument.
        given: the object.
        others: what may be given instead.

    Raises:
        TypeError: it lacks them.
        ValueError: its keys have bags of different samples.
    """
    has_offsets = _has_methods(given, "offsets")
    if not _has_methods(given, "keys", "values", "stride") or not (has_offsets or _has_methods(given, "lengths")):
        raise TypeError(
            f"{name} is {a_kind(given)}; pass {others}, or a KeyedJaggedTensor: an object with keys(), values(), "
            "stride(), and offsets() or lengths()"
        )
    if _has_methods(given, "variable_stride_per_key") and given.variable_stride_per_key():
        raise ValueError(
            f"{name} has a stride for each of its keys; look the keys up one by one, keyed[key], or give every key one "
            "bag for each sample"
        )
    read_bags = given.offsets if has_offsets else given.lengths
    per_key = given.offset_per_key() if isinstance(given, KeyedJaggedTensor) and given.is_checked else None
    keys, stride, ids = given.keys(), given.stride(), given.values()
    return KeyedFeatures(keys, stride, ids, read_bags, has_offsets, _weights_of(given), per_key)


class GivenFeature(NamedTuple):
    """One feature of a mapping: its ids or keys, and their bags.

    Attributes:
        ids: a tensor, or keys of any kind.
        offsets: each bag's first id; None for bags of one size.
        weights: one per id, or None.
        is_closed: True if the last of the offsets is the number of ids.
    """

    ids: Any
    offsets: Any = None
    weights: Any = None
    is_closed: bool = False

    @property
    def stride(self) -> int:
        """The number of bags."""
        return len(self.ids) if self.offsets is None else max(len(self.offsets) - self.is_closed, 0)

    @property
    def per_bag(self) -> int:
        """The number of ids per bag; -1 if there are offsets."""
        if self.offsets is not None:
            return -1
        return 1 if self.ids.ndim == 1 else int(self.ids.shape[1])

    def require_offsets(self, name: str) -> None:
        """Raise ValueError unless offsets ascend from 0 within the ids, after waiting for a GPU."""
        if self.offsets is None:
            return
        count, before = len(self.ids), 0
        if len(self.offsets) > self.stride and int(self.offsets[-1]) != count:
            raise ValueError(f"feature {name!r} has offsets up to {int(self.offsets[-1])}, but {count} ids")
        for place, offset in enumerate(self.offsets.tolist()):
            if place == 0 and offset != 0:
                raise ValueError(f"offsets[0] of feature {name!r} is {offset}; the first bag begins at 0")
            if not before <= offset <= count:
                raise ValueError(
                    f"offsets[{place}] of feature {name!r} is {offset} after {before}, and there are {count} ids; bags "
                    "lie one after the other, so offsets ascend"
                )
            before = offset

    def with_rows(self, rows: Tensor) -> Tensor | GivenFeature:
        """Return the feature with rows in place of its keys."""
        if self.offsets is None:
            return rows if self.weights is None else self._replace(ids=rows)
        return self._replace(ids=rows, offsets=self.offsets.to(rows.device) if self.is_closed else self.offsets)


def checked_feature(name: str, value: Any) -> GivenFeature:
    """Return a feature with consistent ids, offsets and weights, without checking that offsets ascend.

    Raises:
        TypeError, ValueError: they are inconsistent; the message names the feature.
    """
    feature = given_feature(name, value)
    ids, offsets, weights, _ = feature
    if offsets is None:
        require_bags(name, ids)
    else:
        kernels.require_id_dtype(ids, f"feature {name!r}")
    if weights is not None:
        require_weights(f"weights of feature {name!r}", weights, ids)
    if offsets is None:
        return feature
    kernels.require_id_dtype(offsets, f"offsets of feature {name!r}")
    if ids.ndim != 1 or offsets.ndim != 1 or ids.device != offsets.device:
        raise ValueError(
            f"feature {name!r} has ids of shape {tuple(ids.shape)} on {ids.device} and offsets of shape "
            f"{tuple(offsets.shape)} on {offsets.device}; both have one dimension, on one device"
        )
    if len(ids) and not len(offsets):
        raise ValueError(f"feature {name!r} has {len(ids)} ids, but its offsets are empty; begin the first bag at 0")
    return feature


def given_feature(name: str, value: Any, *, takes_keys: bool = False) -> GivenFeature:
    """Return a feature that is a tensor, a tuple (ids, offsets) or (ids, offsets, weights), or a jagged tensor.

    Args:
        name: the feature's.
        value: its value.
        takes_keys: True if any other value is keys.

    Raises:
        TypeError, ValueError: it is none of these; the message names the feature.
    """
    if isinstance(value, GivenFeature):
        return value
    if isinstance(value, Tensor) and not value.is_nested:
        return GivenFeature(value)
    if isinstance(value, tuple | list) and not (takes_keys and (not value or is_single_key(value[0]))):
        if len(value) not in (2, 3):
            raise ValueError(
                f"feature {name!r} is {a_kind(value)} of {len(value)}; give a tensor of ids, or "
                "(ids, offsets[, weights])"
            )
        return GivenFeature(*value)
    if _has_methods(value, "values", "offsets"):  # TorchRec's, torch.nested's, or speedswap's
        jagged: Any = value.contiguous() if isinstance(value, Tensor) else value  # without ids between the bags
        return GivenFeature(jagged.values(), jagged.offsets(), _weights_of(jagged), is_closed=True)
    if takes_keys:
        return GivenFeature(value)
    raise TypeError(
        f"feature {name!r} is {a_kind(value)}; give a tensor of ids, (ids, offsets[, weights]), or a jagged tensor"
    )


def require_bags(name: str, ids: Any) -> None:
    """Raise TypeError or ValueError unless the ids of a feature without offsets are one or several per sample."""
    kernels.require_id_dtype(ids, f"feature {name!r}")
    if ids.ndim not in (1, 2):
        raise ValueError(
            f"feature {name!r} has shape {tuple(ids.shape)}; give (batch,), or (batch, ids per sample) filled up "
            "with padding_idx, or (ids, offsets)"
        )


def require_weights(what: str, weights: Any, ids: Tensor) -> None:
    """Raise TypeError or ValueError unless weights are floating-point, one per id, on the ids' device."""
    kernels.require_dense(weights, what)
    if not weights.is_floating_point():
        raise TypeError(f"{what} have dtype {weights.dtype}; convert them with .float()")
    if weights.shape != ids.shape or weights.device != ids.device:
        raise ValueError(
            f"{what} have shape {tuple(weights.shape)} on {weights.device}, but ids {tuple(ids.shape)} on "
            f"{ids.device}; give one per id"
        )


def _weights_of(jagged: Any) -> Tensor | None:
    weights: Tensor | None = jagged.weights_or_none() if _has_methods(jagged, "weights_or_none") else None
    return weights


def _has_methods(thing: Any, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)

"""InfinityBatch's error, its warning, and the codes of all its warnings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from speedswap.errors import SpeedswapError
from speedswap.monitor import CODES as MONITOR_CODES
from speedswap.monitor import Code, MonitorWarning


class InfinityBatchError(SpeedswapError):
    """A component that training needs is missing or does not fit."""


class InfinityBatchWarning(MonitorWarning):
    """InfinityBatch continues, but not as requested."""


OWN_CODES: Mapping[str, Code] = MappingProxyType(
    {
        "SW901": Code("user", "optimizer was spelled optimier", InfinityBatchWarning),
        "SW902": Code("expert", "forward and backward devices are the same", InfinityBatchWarning),
        "SW903": Code("user", "backward() was called without a loss", InfinityBatchWarning),
        "SW904": Code("user", "an epoch had no batches", InfinityBatchWarning),
        "SW905": Code("user", "the model has no trainable parameters", InfinityBatchWarning),
    }
)
CODES: Mapping[str, Code] = MappingProxyType({**MONITOR_CODES, **OWN_CODES})

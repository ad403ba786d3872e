"""Watch training: steps that a loop leaves out, memory by phase, parameters, the splitter's batches, tables."""

from speedswap.kernels import HotCounts
from speedswap.monitor.callbacks import EventMonitor, Progress, SplitRecorder
from speedswap.monitor.codes import (
    CODES,
    ChangeWarning,
    Code,
    Level,
    LoopWarning,
    MemoryWarning,
    MonitorWarning,
    WarningPolicy,
    as_policy,
)
from speedswap.monitor.figures import (
    MemoryMonitor,
    MemorySnapshot,
    PhaseMemory,
    count_parameters,
    hot_rows,
    memory_snapshot,
    table_metrics,
)

__all__ = [
    "CODES",
    "ChangeWarning",
    "Code",
    "EventMonitor",
    "HotCounts",
    "Level",
    "LoopWarning",
    "MemoryMonitor",
    "MemorySnapshot",
    "MemoryWarning",
    "MonitorWarning",
    "PhaseMemory",
    "Progress",
    "SplitRecorder",
    "WarningPolicy",
    "as_policy",
    "count_parameters",
    "hot_rows",
    "memory_snapshot",
    "table_metrics",
]

"""Watch training: steps that a loop leaves out, memory by phase, parameters, the splitter's batches, tables."""

from speedswap.monitor.callbacks import Progress, SplitRecorder
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
from speedswap.monitor.figures import HotCounts, count_parameters, hot_rows, table_metrics
from speedswap.monitor.loop import EventMonitor
from speedswap.monitor.memory import MemoryMonitor, MemorySnapshot, PhaseMemory, memory_snapshot

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

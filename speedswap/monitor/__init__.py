"""Watch training: steps that a loop leaves out, memory by phase, parameters, and the splitter's batches one by one."""

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
from speedswap.monitor.loop import EventMonitor
from speedswap.monitor.memory import MemoryMonitor, MemorySnapshot, PhaseMemory, memory_snapshot
from speedswap.monitor.parameters import count_parameters

__all__ = [
    "CODES",
    "ChangeWarning",
    "Code",
    "EventMonitor",
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
    "memory_snapshot",
]

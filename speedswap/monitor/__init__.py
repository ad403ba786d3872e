"""Watch training: what a loop leaves out, what memory goes where, what changed, and how it went."""

from speedswap.monitor.changes import Change, ChangeObserver
from speedswap.monitor.codes import (
    CODES,
    ChangeWarning,
    Code,
    LoopWarning,
    MemoryWarning,
    MonitorWarning,
    WarningPolicy,
)
from speedswap.monitor.history import Entry, History, memory_history
from speedswap.monitor.loop import EventMonitor
from speedswap.monitor.memory import MemoryMonitor, PhaseMemory
from speedswap.monitor.parameters import ModuleCount, ParameterCount, count_parameters
from speedswap.monitor.progress import Progress
from speedswap.monitor.recorder import SplitRecorder
from speedswap.monitor.snapshots import MemorySnapshot, memory_snapshot
from speedswap.monitor.statistics import RunningStatistics
from speedswap.monitor.storage import (
    DiskStorage,
    HostStorage,
    LastStorage,
    NoStorage,
    StatisticsStorage,
    Storage,
    make_storage,
)
from speedswap.monitor.tensors import Lifetime, TensorTracker
from speedswap.monitor.writers import CsvWriter, JsonLinesWriter, ScalarWriter, Writer, make_writer

__all__ = [
    "CODES",
    "Change",
    "ChangeObserver",
    "ChangeWarning",
    "Code",
    "CsvWriter",
    "DiskStorage",
    "Entry",
    "EventMonitor",
    "History",
    "HostStorage",
    "JsonLinesWriter",
    "LastStorage",
    "Lifetime",
    "LoopWarning",
    "MemoryMonitor",
    "MemorySnapshot",
    "MemoryWarning",
    "ModuleCount",
    "MonitorWarning",
    "NoStorage",
    "ParameterCount",
    "PhaseMemory",
    "Progress",
    "RunningStatistics",
    "ScalarWriter",
    "SplitRecorder",
    "StatisticsStorage",
    "Storage",
    "TensorTracker",
    "WarningPolicy",
    "Writer",
    "count_parameters",
    "make_storage",
    "make_writer",
    "memory_history",
    "memory_snapshot",
]

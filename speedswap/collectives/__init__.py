"""Agreement between the processes of a job: rounds of numbers, votes, one error for all, and sums of gradients."""

from speedswap.collectives.ahead import Ahead, Errand, OwnPace
from speedswap.collectives.group import Buckets, RankGroup, begin_batch, is_distributed, of_all_ranks, surround_forward
from speedswap.collectives.lane import SPARE_IDS, Lane
from speedswap.collectives.levels import Asked, Levels
from speedswap.collectives.messages import (
    ANYTHING,
    ROOM,
    Agreed,
    Kind,
    Parcel,
    Way,
    as_bytes,
    digest_of,
    packed,
    unpacked,
)
from speedswap.collectives.task import PeerOutOfMemory, Task

__all__ = [
    "ANYTHING",
    "ROOM",
    "SPARE_IDS",
    "Agreed",
    "Ahead",
    "Asked",
    "Buckets",
    "Errand",
    "Kind",
    "Lane",
    "Levels",
    "OwnPace",
    "Parcel",
    "PeerOutOfMemory",
    "RankGroup",
    "Task",
    "Way",
    "as_bytes",
    "begin_batch",
    "digest_of",
    "is_distributed",
    "of_all_ranks",
    "packed",
    "surround_forward",
    "unpacked",
]

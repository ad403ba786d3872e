"""Agreement between the processes of a job: rounds of numbers, votes, one error for all, and sums of gradients."""

from speedswap.collectives.ahead import Ahead, Ended, Errand
from speedswap.collectives.buckets import BUCKET_BYTES, Buckets
from speedswap.collectives.calls import of_all_ranks
from speedswap.collectives.exchange import Exchange, PeerOutOfMemory, Status, is_distributed
from speedswap.collectives.group import RankGroup, begin_step
from speedswap.collectives.kinds import ANYTHING, Kind
from speedswap.collectives.lane import SPARE_IDS, Lane
from speedswap.collectives.letters import Letter, Parcel, as_bytes, packed, unpacked
from speedswap.collectives.lines import Round, digest_of, note_of
from speedswap.collectives.pace import OwnPace, Server
from speedswap.collectives.sharing import Difference, difference_of, share, share_numbers
from speedswap.collectives.sheet import ROOM, Agreed
from speedswap.collectives.task import Pending, Task

__all__ = [
    "ANYTHING",
    "BUCKET_BYTES",
    "ROOM",
    "SPARE_IDS",
    "Agreed",
    "Ahead",
    "Buckets",
    "Difference",
    "Ended",
    "Errand",
    "Exchange",
    "Kind",
    "Lane",
    "Letter",
    "OwnPace",
    "Parcel",
    "PeerOutOfMemory",
    "Pending",
    "RankGroup",
    "Round",
    "Server",
    "Status",
    "Task",
    "as_bytes",
    "begin_step",
    "difference_of",
    "digest_of",
    "is_distributed",
    "note_of",
    "of_all_ranks",
    "packed",
    "share",
    "share_numbers",
    "unpacked",
]

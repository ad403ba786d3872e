"""Agreement between the processes of a job: rounds of numbers, votes, one error for all, and sums of gradients."""

from speedswap.collectives.ahead import Ahead as Ahead
from speedswap.collectives.ahead import Errand as Errand
from speedswap.collectives.ahead import OwnPace as OwnPace
from speedswap.collectives.group import Buckets as Buckets
from speedswap.collectives.group import RankGroup as RankGroup
from speedswap.collectives.group import begin_batch as begin_batch
from speedswap.collectives.group import is_distributed as is_distributed
from speedswap.collectives.group import of_all_ranks as of_all_ranks
from speedswap.collectives.group import surround_forward as surround_forward
from speedswap.collectives.lane import SPARE_IDS as SPARE_IDS
from speedswap.collectives.lane import Lane as Lane
from speedswap.collectives.levels import Asked as Asked
from speedswap.collectives.levels import Levels as Levels
from speedswap.collectives.messages import ANYTHING as ANYTHING
from speedswap.collectives.messages import ROOM as ROOM
from speedswap.collectives.messages import Agreed as Agreed
from speedswap.collectives.messages import Kind as Kind
from speedswap.collectives.messages import Parcel as Parcel
from speedswap.collectives.messages import Way as Way
from speedswap.collectives.messages import as_bytes as as_bytes
from speedswap.collectives.messages import digest_of as digest_of
from speedswap.collectives.messages import packed as packed
from speedswap.collectives.messages import unpacked as unpacked
from speedswap.collectives.task import PeerOutOfMemory as PeerOutOfMemory
from speedswap.collectives.task import Task as Task

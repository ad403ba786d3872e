"""Neural collaborative filtering: who will take what, with the tables of users and items outside the compute device.

As a command, ``speedswap ncf RATINGS --output DIR``; as a function::

    from speedswap.apps.ncf import Settings, train

    result = train(Settings(ratings=Path("ml-100k/u.data"), epochs=20))
    print(result.best)

A run reads ratings (``ratings``) or makes some up (``generated``), sets each user's latest one apart
(``interactions``), draws batches with negatives (``batches``), trains two embeddings and a small network (``model``,
``training``), ranks the items set apart (``evaluation``) and keeps the last and the best epoch (``checkpoint``,
``output``).
"""

from speedswap.apps.ncf.batches import Batch, Batches
from speedswap.apps.ncf.checkpoint import load
from speedswap.apps.ncf.errors import CheckpointError, RatingsError, SettingsError
from speedswap.apps.ncf.evaluation import Candidates, Ranking, evaluate
from speedswap.apps.ncf.generated import generate_split
from speedswap.apps.ncf.interactions import Interactions, Split, leave_one_out
from speedswap.apps.ncf.model import NCF
from speedswap.apps.ncf.output import figures, save
from speedswap.apps.ncf.ratings import read_split
from speedswap.apps.ncf.settings import Settings
from speedswap.apps.ncf.training import Epoch, Result, train, train_step

__all__ = [
    "NCF",
    "Batch",
    "Batches",
    "Candidates",
    "CheckpointError",
    "Epoch",
    "Interactions",
    "Ranking",
    "RatingsError",
    "Result",
    "Settings",
    "SettingsError",
    "Split",
    "evaluate",
    "figures",
    "generate_split",
    "leave_one_out",
    "load",
    "read_split",
    "save",
    "train",
    "train_step",
]

"""Neural collaborative filtering: predict purchases from ratings, with both tables outside the compute device.

As a command, ``speedswap ncf RATINGS --output DIR``; as a function::

    from speedswap.apps.ncf import NcfSettings, train

    result = train(NcfSettings(ratings=Path("ml-100k/u.data"), epochs=20))
    print(result.best)

and afterwards ``load(output).recommend(user_ids)``, or ``speedswap recommend DIR --user ID``.

A run reads ratings (``ratings``, ``form``, ``columns``) or generates them, sets each user's latest one apart, draws
batches with negatives (``interactions``), trains two embeddings and a small network, ranks the items set apart
(``model``, ``training``) and keeps the last and the best epoch. A saved model names the best items for users by their
own ids.
"""

from speedswap.apps.errors import CheckpointError, RatingsError, SettingsError, UnknownUserError
from speedswap.apps.ncf.form import RatingsSource
from speedswap.apps.ncf.interactions import (
    Interactions,
    NcfBatch,
    NcfSplit,
    OwnIds,
    draw_batches,
    generate_split,
    leave_one_out,
)
from speedswap.apps.ncf.model import NCF, Candidates, Ranking, Recommendations, evaluate
from speedswap.apps.ncf.ratings import read_split
from speedswap.apps.ncf.settings import NcfSettings
from speedswap.apps.ncf.training import NcfEpoch, NcfRun, load, train, train_step

Settings, Run = NcfSettings, NcfRun

__all__ = [
    "NCF",
    "Candidates",
    "CheckpointError",
    "Interactions",
    "NcfBatch",
    "NcfEpoch",
    "NcfRun",
    "NcfSettings",
    "NcfSplit",
    "OwnIds",
    "Ranking",
    "RatingsError",
    "RatingsSource",
    "Recommendations",
    "Run",
    "Settings",
    "SettingsError",
    "UnknownUserError",
    "draw_batches",
    "evaluate",
    "generate_split",
    "leave_one_out",
    "load",
    "read_split",
    "train",
    "train_step",
]

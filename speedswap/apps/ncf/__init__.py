"""Neural collaborative filtering: predict purchases from ratings, with both tables outside the compute device.

As a command, ``speedswap ncf RATINGS --output DIR``; as a function::

    from speedswap.apps.ncf import NcfSettings, train

    result = train(NcfSettings(ratings=Path("ml-100k/u.data"), epochs=20))
    print(result.best)

and afterwards ``load(output).recommend(user_ids)``, or ``speedswap recommend DIR --user ID``.

A run reads ratings (``form``, ``ratings``) or generates them, sets each user's latest one apart, draws
batches with negatives (``interactions``), trains two embeddings and a small network, ranks the items set apart
(``model``, ``training``) and keeps the last and the best epoch. A saved model names the best items for users by their
own ids.
"""

from speedswap.apps.ncf.model import NCF, Ranking, Recommendations
from speedswap.apps.ncf.settings import NcfSettings
from speedswap.apps.ncf.training import NcfRun, load, train

Settings, Run = NcfSettings, NcfRun

__all__ = ["NCF", "NcfRun", "NcfSettings", "Ranking", "Recommendations", "Run", "Settings", "load", "train"]

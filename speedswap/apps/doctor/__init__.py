"""A diagnosis of this machine, and the best place for a table, estimated from rates measured here.

``speedswap doctor`` runs it; docs/doctor.md explains its output. From Python::

    from speedswap.apps.doctor import Rates, TableSpec, estimate

    spec = TableSpec(10**8, 128, "adam", batch=65_536)
    for place in estimate(spec, Rates.measured(spec, Path(".")), Path(".")):
        print(place.name, place.fits, place.seconds, place.code)
"""

from speedswap.apps.doctor.findings import Finding, examine
from speedswap.apps.doctor.places import PlaceEstimate, estimate
from speedswap.apps.doctor.rates import Rates, TableSpec

__all__ = ["Finding", "PlaceEstimate", "Rates", "TableSpec", "estimate", "examine"]

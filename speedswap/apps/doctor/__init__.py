"""A diagnosis of this machine, and the best places for tables, estimated from rates measured here.

``speedswap doctor`` runs it; docs/doctor.md explains its output. From Python::

    from speedswap.apps.doctor import TableSpec, advise, lines

    tables, rates = advise([TableSpec(10**8, 128, "adam", batch=65_536)], Path("."))
    for place in tables[0].options:
        print(place.name, place.fits, place.seconds)
    print(lines(tables))
"""

from speedswap.apps.doctor.findings import Finding, examine
from speedswap.apps.doctor.places import PlaceEstimate, Rates, TableAdvice, TableSpec, advise, lines

__all__ = ["Finding", "PlaceEstimate", "Rates", "TableAdvice", "TableSpec", "advise", "examine", "lines"]

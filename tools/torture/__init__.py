"""A standing attack on what speedswap promises: ``make torture``, or ``PYTHONPATH=tools python -m torture --help``."""

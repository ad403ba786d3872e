"""Training large tables of an NCF model: a part of ``bench_ncf.py``."""

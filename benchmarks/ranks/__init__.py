"""Tables over many processes: the parts of ``bench_ranks.py``."""

"""The parts of ``bench_batching.py``, one question each."""

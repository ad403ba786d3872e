"""Tables larger than memory, compared with other stores on disk: the parts of ``bench_disk.py``."""

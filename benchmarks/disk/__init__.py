"""Tables larger than memory beside other stores on disk: the parts of ``bench_disk.py``."""

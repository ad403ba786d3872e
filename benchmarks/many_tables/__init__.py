"""Many small tables in one training step: the trainers of bench_many_tables.py."""

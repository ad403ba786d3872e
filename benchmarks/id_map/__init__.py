"""Maps from keys to rows, for bench_id_map.py."""

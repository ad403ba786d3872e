"""What speedswap is for, as programs: the main jobs, and the examples to read first."""

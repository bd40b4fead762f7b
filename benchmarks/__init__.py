"""Benchmarks: `python -m benchmarks.run` from the repository root, or `make bench`."""

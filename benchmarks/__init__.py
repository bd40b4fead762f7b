"""Benchmarks, from the repository root: `python -m benchmarks.run` (or `make bench`), `.features`, `.power`, `.layer`, `.tiles`."""

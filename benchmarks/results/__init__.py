"""Pages of our own results, written from their records: ``python -m benchmarks.results PAGE``."""

COMMAND = "python -m benchmarks.results"
"""The program, as the pages name it."""

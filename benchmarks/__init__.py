"""Programs that time things: ``python -m benchmarks.NAME`` from the root of the repository."""

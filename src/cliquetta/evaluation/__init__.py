"""Streams, runs, metrics and records."""

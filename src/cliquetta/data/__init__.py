"""Datasets, readers, corruptions and views."""

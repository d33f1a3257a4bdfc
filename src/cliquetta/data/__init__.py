"""Data sets, readers, corruptions and views."""

"""Predictions for any number of images: rows in memory or files that survive being stopped."""

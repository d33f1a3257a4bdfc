"""Adapt CLIP while it predicts: SCAP and the methods that it is compared with."""

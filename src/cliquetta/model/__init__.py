"""One promptable CLIP: towers, tokeniser, preprocessing, loading."""

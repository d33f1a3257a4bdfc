"""What ``accuracy.py`` is made of: worlds, held sets and streams, contestants, tables."""

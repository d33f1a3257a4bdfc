"""Checkpoint families: each file knows the key names and the rules of one."""

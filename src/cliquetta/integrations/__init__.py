"""Adapted models inside labelling tools; each module needs the package of its tool."""

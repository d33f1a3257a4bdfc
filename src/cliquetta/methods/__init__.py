"""Methods: one paper, one file.

docs/methods/NAME.md says what differs from the authors' code.

The second paragraph of a file begins with the citation, which the registry reads.
"""

"""The contract, the registry, and the methods: one paper, one file."""

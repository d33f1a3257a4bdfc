"""What methods are built from: contract, registry, state files, configs, memory, caches, views."""

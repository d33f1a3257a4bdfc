"""What several methods share: configs, memory, optimisers, caches, views, few-shot fitting."""

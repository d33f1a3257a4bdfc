"""Parts that methods are built from: configs, memory, caches, LayerNorms, views, few-shot fits."""

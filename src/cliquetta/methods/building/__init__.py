"""Parts of methods: configs, memory, caches, LayerNorms, views, few-shot fits."""

"""How large the cliques of a stream are, by batch size (the right-hand side of the paper's figure).

Mining only: one pass over the images, nothing is learned.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from cliquetta.data.prepared import FeatureStream
from cliquetta.evaluation.ablation import zero_shot
from cliquetta.evaluation.sweep import RunContext, RunSpec
from cliquetta.methods.registry import method_config
from cliquetta.methods.scap.cliques import mine_cliques, similar_images, top_classes


@torch.no_grad()
def largest_cliques(
    context: RunContext, spec: RunSpec, batch_sizes: Sequence[int]
) -> dict[int, float]:
    """Members of the largest clique of a batch, on average over batches, by batch size.

    ``spec`` is a run of SCAP: its order, its threshold. A batch without cliques counts as 0.
    """
    config = method_config("scap", spec.preset, dict(spec.options))
    adapter, stream = context.prepare(zero_shot(spec))
    pixels = stream.stream if isinstance(stream, FeatureStream) else stream
    model = adapter.model
    features = torch.cat(
        [model.encode_image(b.images.to(model.device), normalize=True).cpu() for b, _ in pixels]
    )
    logits = model.scale * features @ model.classifier(adapter.prompts).cpu().T
    sizes = {}
    for size in batch_sizes:
        largest = []
        batches = zip(torch.split(features, size), torch.split(logits, size), strict=True)
        for part, scores in batches:
            cliques = mine_cliques(
                similar_images(part, config.threshold),
                top_classes(scores, config.topk),
                full_set=config.full_set,
                deduplicate=config.deduplicate == "class",
            )
            members = cliques.sets.sum(dim=1)
            largest.append(int(members.max()) if len(members) else 0)
        sizes[size] = statistics.mean(largest)
    return sizes

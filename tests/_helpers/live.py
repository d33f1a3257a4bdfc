"""LayerNorm adaptation as a plain training loop does it: torch changes the weights themselves."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cliquetta.model.clip import CLIP
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY_PROMPTS


def double_clip() -> CLIP:
    """A tiny CLIP of its own in float64, where the order of sums decides nothing."""
    return build_tiny_clip().double()


def open_norms(tower: nn.Module) -> list[Tensor]:
    """All LayerNorm parameters of a tower, made learnable."""
    norms = [module for module in tower.modules() if isinstance(module, nn.LayerNorm)]
    return [p.requires_grad_(True) for norm in norms for p in (norm.weight, norm.bias)]


class Live:
    """A tiny CLIP in float64, its class texts (N, E) and its image tower's open LayerNorms."""

    def __init__(self) -> None:
        self.model = double_clip()
        self.scale, self.text = self.model.scale, self.model.classifier(TINY_PROMPTS)
        self.norms = open_norms(self.model.visual)

    def features(self, images: Tensor) -> Tensor:
        """Unit features (B, E) under the current norms."""
        return unit_rows(self.model.encode_image(images))

    def logits(self, images: Tensor) -> Tensor:
        """Scaled cosines (B, N) of images and class texts under the current norms."""
        return self.scale * self.features(images) @ self.text.T

    def predict(self, images: Tensor) -> Tensor:
        """Logits as methods return them."""
        return self.logits(images).detach().float()


def descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down a loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def load_norms(norms: Sequence[Tensor], values: Tensor) -> None:
    """Write flat values into the parameters."""
    with torch.no_grad():
        for norm, part in zip(
            norms, values.split([n.numel() for n in norms]), strict=True
        ):
            norm.copy_(part.view_as(norm))


def unit_rows(x: Tensor) -> Tensor:
    return x / (x * x).sum(dim=-1, keepdim=True).sqrt()


def entropies(logits: Tensor) -> Tensor:
    """Entropy of each softmax of logits (..., N), by its definition."""
    p = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    return -(p * p.log()).sum(dim=-1)


def surest(logits: Tensor, fraction: float) -> Tensor:
    """Indices of the surest fraction of views with logits (V, N), at least of one."""
    return entropies(logits.detach()).argsort()[: max(1, int(fraction * len(logits)))]


def literal_transductive_loss(
    v: Tensor, t: Tensor, scale: float, temperature: float, *, detach: bool = False
) -> Tensor:
    """CLIPArTT's loss, entry by entry."""
    B = len(v)
    q = [
        [((v[i] @ v[j] + t[i] @ t[j]) / 2 / temperature).exp() for j in range(B)]
        for i in range(B)
    ]
    loss = v.new_zeros(())
    for image in range(B):
        z = torch.stack([scale * (t[text] @ v[image]) for text in range(B)])
        log_p = z - z.exp().sum().log()
        for text in range(B):
            target = (
                q[text][image] / torch.stack(q[text]).sum()
            )  # softmax along Q's own row
            loss = loss - (target.detach() if detach else target) * log_p[text]
    return loss / B

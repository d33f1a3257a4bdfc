"""The ModifiedResNet image tower of CLIP's RN models: plain encoding only."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.model.config import ResNetConfig


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions; strides are average pools, on the shortcut too."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
            parts = {"-1": nn.AvgPool2d(stride), "0": convolution, "1": nn.BatchNorm2d(outputs)}
            self.downsample = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(self.avgpool(x))) + shortcut)


class ResNetPool(nn.Module):
    """One attention layer whose only query is the mean of all positions."""

    def __init__(self, side: int, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.zeros(side**2 + 1, width))
        self.k_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.c_proj = nn.Linear(width, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, E) of a map (B, C, S, S)."""
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([x.mean(dim=1, keepdim=True), x], dim=1) + self.positional_embedding
        B, T, D = x.shape
        heads = (self.heads, D // self.heads)
        q = self.q_proj(x[:, :1]).view(B, 1, *heads).transpose(1, 2)
        k = self.k_proj(x).view(B, T, *heads).transpose(1, 2)
        v = self.v_proj(x).view(B, T, *heads).transpose(1, 2)
        pooled = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, D)
        features: Tensor = self.c_proj(pooled)
        return features


class ModifiedResNet(nn.Module):
    """A three-convolution stem, four stages of bottlenecks, attention pooling."""

    def __init__(self, config: ResNetConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.conv1 = nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width // 2)
        self.conv3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.avgpool = nn.AvgPool2d(2)
        inputs = width
        for stage, blocks in enumerate(config.layers):
            planes = width * 2**stage
            layers = []
            for index in range(blocks):
                layers.append(Bottleneck(inputs, planes, 2 if stage and index == 0 else 1))
                inputs = planes * Bottleneck.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.attnpool = ResNetPool(config.image_size // 32, inputs, config.heads, embed_dim)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (B, E), not normalised."""
        x = pixels.to(self.conv1.weight.dtype)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.avgpool(F.relu(self.bn3(self.conv3(x))))
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        features: Tensor = self.attnpool(x)
        return features

"""A small CLIP with OpenAI's attribute names, built of torch's own attention: a second opinion."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests._helpers.tolerance import FEATURE

SIZE = 32
PATCH = 8
WIDTH = 128
EMBED_DIM = 24
SETTINGS = {"input_resolution": SIZE, "context_length": 77, "vocab_size": 49408}


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * torch.sigmoid(1.702 * x)


class ResidualBlock(nn.Module):
    def __init__(self, width: int, heads: int, activation: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_1 = nn.LayerNorm(width)
        c_fc = nn.Linear(width, 4 * width)
        c_proj = nn.Linear(4 * width, width)
        gelu = QuickGELU() if activation == "quick_gelu" else nn.GELU()
        self.mlp = nn.Sequential(OrderedDict(c_fc=c_fc, gelu=gelu, c_proj=c_proj))
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int, activation: str) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, heads, activation) for _ in range(2)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(
            torch.randn((SIZE // PATCH) ** 2 + 1, WIDTH)
        )
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.transformer = Transformer(WIDTH, WIDTH // 64, activation)
        self.ln_post = nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(torch.randn(WIDTH, EMBED_DIM) * WIDTH**-0.5)

    def forward(self, pixels: Tensor) -> Any:
        x = self.conv1(pixels).flatten(2).permute(2, 0, 1)
        first = self.class_embedding.expand(1, x.shape[1], -1)
        x = torch.cat([first, x]) + self.positional_embedding[:, None]
        x = self.transformer(self.ln_pre(x), None)
        return self.ln_post(x[0]) @ self.proj


class OpenAIModule(nn.Module):
    """Takes pixels and ids, returns both features; ``logit_scale`` only rides along."""

    def __init__(self, *, activation: str = "quick_gelu", seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.visual = Visual(activation)
        self.transformer = Transformer(64, 1, activation)
        self.token_embedding = nn.Embedding(SETTINGS["vocab_size"], 64)
        self.positional_embedding = nn.Parameter(
            torch.randn(SETTINGS["context_length"], 64) * 0.3
        )
        self.ln_final = nn.LayerNorm(64)
        self.text_projection = nn.Parameter(torch.randn(64, EMBED_DIM) * 0.1)
        self.logit_scale = nn.Parameter(torch.tensor(20.0).log())
        for name, value in SETTINGS.items():
            self.register_buffer(name, torch.tensor(value))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)  # type: ignore[misc]
        self.eval()

    def forward(self, pixels: Tensor, ids: Any) -> Any:
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding[:length]
        x = self.transformer(x.permute(1, 0, 2).contiguous(), mask).permute(1, 0, 2)
        pooled = self.ln_final(x)[torch.arange(len(ids)), ids.argmax(dim=-1)]
        return self.visual(pixels), pooled @ self.text_projection


def bare_state(module: Any) -> Any:
    """The weights without the settings, as open_clip has them."""
    return {k: v for k, v in module.state_dict().items() if k not in SETTINGS}


def save_open_clip(
    state: Any, folder: Path, preprocess: Any = None, **config: Any
) -> Path:
    """Write weights of such a module as a folder in open_clip's format, and return the folder."""
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "open_clip_model.safetensors")
    towers = {"embed_dim": EMBED_DIM, "vision_cfg": {"width": WIDTH}, **config}
    values = {"model_cfg": towers, "preprocess_cfg": preprocess or {}}
    (folder / "open_clip_config.json").write_text(json.dumps(values))
    return folder


def assert_same(model: Any, module: Any, pixels: Tensor) -> None:
    """A loaded model encodes images and texts as the module does."""
    texts = ["cat", "a photo of a frog", "the ship."]
    images, encoded = module(pixels, model.tokenizer(texts))
    torch.testing.assert_close(
        model.encode_image(pixels), images, atol=FEATURE, rtol=FEATURE
    )
    torch.testing.assert_close(
        model.encode_text(texts), encoded, atol=FEATURE, rtol=FEATURE
    )
    assert model.scale == pytest.approx(20)

"""Small random models of transformers, and tokenizer files as their repositories hold them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from tests._helpers.tolerance import FEATURE

XLM = ("<s>", "<pad>", "</s>", "<unk>")
"""Special tokens of XLM-V's vocabulary, in order."""
WORDS = [
    "a",
    "photo",
    "of",
    "sketch",
    "airplane",
    "cat",
    "frog",
    "ship",
    "truck",
    "green",
    "the",
]


def assert_features(actual: Tensor, wanted: Tensor, atol: float = FEATURE) -> None:
    """Equal features, which differ from each other."""
    assert wanted.std() > 0.01
    torch.testing.assert_close(actual, wanted, atol=atol, rtol=FEATURE)


def randomise(model: Any, *, sharpness: float = 1.0) -> Any:
    """Weights whose features depend on the input."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name in ("logit_scale", "logit_bias"):
                weight.fill_(2.0 if name == "logit_scale" else -3.0)
            elif weight.ndim == 1:
                weight += 0.1 * noise
            else:
                kind = "embedding" in name or "probe" in name
                sharp = sharpness if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(
                    noise * (0.5 if kind else sharp * weight[0].numel() ** -0.5)
                )
    return model.eval()


@torch.no_grad()
def noisy(model: Any, scale: float = 0.05) -> Any:
    """A model whose biases and gains are not at their quiet start."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += scale * torch.randn_like(parameter)
    return model.eval()


SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
SHAPE["num_hidden_layers"] = 3
IMAGES = SHAPE | {"image_size": 32, "patch_size": 8}
"""Common shape of the towers, and that of images of 32 pixels."""


def tiny_transformers(activation: str = "quick_gelu") -> Any:
    """A random ``CLIPModel`` whose features depend on the input, with CLIP's vocabulary."""
    act = {"hidden_act": activation}
    text = SHAPE | act | {"layer_norm_eps": 1e-6}
    towers: Any = {"text_config": text, "vision_config": IMAGES | act}
    return randomise(
        transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=24))
    )


def tiny_metaclip2(end: int = 2) -> Any:
    """A random ``MetaClip2Model`` that reads texts at token ``end``."""
    pytest.importorskip("transformers", minversion="5")
    text = {
        "vocab_size": 64,
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    act = {"hidden_act": "gelu"}
    towers: Any = {"text_config": SHAPE | act | text, "vision_config": IMAGES | act}
    config = transformers.MetaClip2Config(**towers, projection_dim=24)
    return randomise(transformers.MetaClip2Model(config))


def tiny_siglip(*, vocab_size: int = 64, sharpness: float = 1.0) -> Any:
    """A random ``SiglipModel`` of 32 pixels, whose texts and images differ in width.

    ``sharpness`` scales queries and keys, so that a few words stand out among the
    padding.
    """
    pytest.importorskip(
        "transformers", minversion="5"
    )  # older ones have another SiglipConfig
    text = SHAPE | {"hidden_size": 48, "projection_size": 64, "intermediate_size": 80}
    text |= {"num_hidden_layers": 2, "vocab_size": vocab_size}
    config = transformers.SiglipConfig(text_config=text, vision_config=IMAGES)
    return randomise(transformers.SiglipModel(config), sharpness=sharpness)


def word_tokenizer(
    path: Path,
    *,
    specials: tuple[str, ...] = ("<pad>", "<eos>", "<bos>", "<unk>"),
    size: int = 64,
) -> None:
    """A ``tokenizer.json`` with one token per word, under Gemma's special tokens or XLM-V's."""
    vocabulary = {token: index for index, token in enumerate([*specials, *WORDS])}
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "<s>" in specials:
        pairs = [(token, specials.index(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=pairs
        )
    tokenizer.save(str(path))


def save_siglip(model: Any, folder: Path) -> Any:
    """The folder of a SigLIP 2: weights, config, tokenizer."""
    model.save_pretrained(folder)
    word_tokenizer(folder / "tokenizer.json", size=model.config.text_config.vocab_size)
    return folder


def open_clip_layout(state: Any) -> Any:
    """The weights of a ``SiglipModel`` under the names that open_clip and timm give them."""
    out = {}
    for key, tensor in state.items():
        tower, _, rest = key.partition("_model.")
        if rest.startswith("encoder.layers."):
            _, _, index, part = rest.split(".", 3)
            block = f"{BLOCKS[tower]}.{index}"
            for theirs, (timm, own) in LAYERS.items():
                if part.startswith(theirs):
                    name = timm if tower == "vision" else own
                    out[f"{block}.{name}{part.removeprefix(theirs)}"] = tensor
            if part.startswith("self_attn.q_proj."):
                kind = part.rsplit(".", 1)[1]
                parts = [
                    state[key.replace("q_proj", f"{letter}_proj")] for letter in "qkv"
                ]
                name = (
                    f"attn.qkv.{kind}" if tower == "vision" else f"attn.in_proj_{kind}"
                )
                out[f"{block}.{name}"] = torch.cat(parts)
        elif "in_proj" in key:
            kind = key.rsplit("_", 1)[1]
            width = tensor.shape[0] // 3
            out[f"visual.trunk.attn_pool.q.{kind}"] = tensor[:width]
            out[f"visual.trunk.attn_pool.kv.{kind}"] = tensor[width:]
        else:
            theirs = next(prefix for prefix in OTHERS if key.startswith(prefix))
            name = key.replace(theirs, OTHERS[theirs], 1)
            out[name] = tensor[None] if name == "visual.trunk.pos_embed" else tensor
    return {key: tensor.clone() for key, tensor in out.items()}


BLOCKS = {"vision": "visual.trunk.blocks", "text": "text.transformer.resblocks"}
LAYERS = {
    "layer_norm1.": ("norm1.", "ln_1."),
    "layer_norm2.": ("norm2.", "ln_2."),
    "self_attn.out_proj.": ("attn.proj.", "attn.out_proj."),
    "mlp.fc1.": ("mlp.fc1.", "mlp.c_fc."),
    "mlp.fc2.": ("mlp.fc2.", "mlp.c_proj."),
}
OTHERS = {
    "vision_model.embeddings.patch_embedding.": "visual.trunk.patch_embed.proj.",
    "vision_model.embeddings.position_embedding.weight": "visual.trunk.pos_embed",
    "vision_model.post_layernorm.": "visual.trunk.norm.",
    "vision_model.head.probe": "visual.trunk.attn_pool.latent",
    "vision_model.head.attention.out_proj.": "visual.trunk.attn_pool.proj.",
    "vision_model.head.layernorm.": "visual.trunk.attn_pool.norm.",
    "vision_model.head.mlp.": "visual.trunk.attn_pool.mlp.",
    "text_model.embeddings.token_embedding.": "text.token_embedding.",
    "text_model.embeddings.position_embedding.weight": "text.positional_embedding",
    "text_model.final_layer_norm.": "text.ln_final.",
    "text_model.head.": "text.text_projection.",
    "logit_": "logit_",
}


def save_open_clip_siglip(
    model: Any, folder: Path, tokenizer: str = "owner/tokenizer"
) -> Any:
    """The folder of a SigLIP 2 in open_clip's format, without its tokenizer."""
    folder.mkdir(exist_ok=True)
    save_file(
        open_clip_layout(model.state_dict()), folder / "open_clip_model.safetensors"
    )
    theirs = model.config.vision_config
    text = model.config.text_config
    vision_cfg = {
        "image_size": theirs.image_size,
        "timm_model_name": "vit_base_patch32_siglip_256",
    }
    vision_cfg |= {
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    }
    text_cfg = {"width": text.hidden_size, "heads": text.num_attention_heads}
    text_cfg |= {"layers": text.num_hidden_layers, "vocab_size": text.vocab_size}
    text_cfg |= {
        "context_length": 64,
        "hf_tokenizer_name": tokenizer,
        "pool_type": "last",
    }
    text_cfg |= {
        "no_causal_mask": True,
        "proj_bias": True,
        "norm_kwargs": {"eps": 1e-6},
    }
    text_cfg["act_kwargs"] = {"approximate": "tanh"}
    text_cfg["tokenizer_kwargs"] = {"clean": "canonicalize"}
    config = {
        "embed_dim": theirs.hidden_size,
        "init_logit_bias": -10,
        "custom_text": True,
    }
    config |= {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
    values = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(values))
    return folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a ``config.json``, in a section with ``SECTION__FIELD``."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        section, _, field = key.partition("__")
        (config[section] if field else config)[field or key] = value
    (folder / "config.json").write_text(json.dumps(config))

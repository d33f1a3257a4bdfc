"""Small random SigLIPs of transformers, and tokenizer files as their repositories hold them."""

from __future__ import annotations

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

WORDS = ["a", "photo", "of", "sketch", "airplane", "cat", "frog", "ship", "truck", "green", "the"]


def randomise(model, seed=0):
    """Weights whose features depend on the input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name in ("logit_scale", "logit_bias"):
                weight.fill_(2.0 if name == "logit_scale" else -3.0)
            elif weight.ndim == 1:
                weight += 0.1 * noise
            else:
                kind = "embedding" in name or "probe" in name
                weight.copy_(noise * (0.5 if kind else weight[0].numel() ** -0.5))
    return model.eval()


def tiny_siglip(seed=0, *, text_width=48, vocab_size=64):
    """A random ``SiglipModel``: 32 px, two blocks, text and image of different width."""
    text = {"hidden_size": text_width, "projection_size": 64, "vocab_size": vocab_size}
    text |= {"intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 64, "image_size": 32, "patch_size": 8}
    vision |= {"intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.SiglipConfig(text_config=text, vision_config=vision)
    return randomise(transformers.SiglipModel(config), seed)


def word_tokenizer(path, *, specials=("<pad>", "<eos>", "<bos>", "<unk>"), size=64):
    """A ``tokenizer.json`` with one token per word, under Gemma's special tokens."""
    vocabulary = {token: index for index, token in enumerate([*specials, *WORDS])}
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def save_siglip(model, folder):
    """The folder of a SigLIP 2: weights, config, tokenizer."""
    model.save_pretrained(folder)
    word_tokenizer(folder / "tokenizer.json", size=model.config.text_config.vocab_size)
    return folder

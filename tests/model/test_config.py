"""Config files that name what no model of ours has: refused with a sentence."""

from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import UserError
from cliquetta.model.factory import create_model
from tests._helpers.transformers_models import rewrite

ODD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "siglip2"}, "not supported.*NaFlex.*siglip2-base-patch16-256"),
    ({"model_type": "align"}, "not supported.*'align'.*from_model"),
    ({"model_type": None}, "not supported.*type None"),
    ({"model_type": ["clip"]}, r"not supported.*\['clip'\]"),
    ({"text_config": "gpt"}, "'text_config' is a str, expected an object"),
    ({"vision_config": [1]}, "'vision_config' is a list"),
    ({"vision_config": None}, "another shape"),
    ({"projection_dim": None}, "embed_dim = None"),
    ({"projection_dim": 0}, "embed_dim = 0"),
    ({"vision_config__hidden_size": "64"}, "width = '64'"),
    ({"vision_config__hidden_size": -64}, "width = -64"),
    ({"vision_config__num_attention_heads": 5}, "heads = 5, which does not divide its width of 64"),
    ({"vision_config__num_attention_heads": 0}, "heads = 0"),
    ({"vision_config__num_hidden_layers": 10**9}, "layers = 1000000000"),
    ({"vision_config__num_hidden_layers": 2.5}, r"layers = 2\.5"),
    ({"vision_config__num_hidden_layers": 4}, r"another shape.*blocks.3.* is missing"),
    ({"vision_config__num_hidden_layers": 2}, r"another shape.*blocks.2.* is unexpected"),
    ({"vision_config__patch_size": 16}, r"another shape.*visual.patch.weight"),
    ({"vision_config__patch_size": [8, 8]}, r"patch_size = \[8, 8\]"),
    ({"vision_config__patch_size": 64}, "patch_size = 64, more than its image_size"),
    ({"vision_config__image_size": 10**12}, "image_size = 1000000000000"),
    ({"vision_config__layer_norm_eps": "tiny"}, "eps = 'tiny'"),
    ({"vision_config__hidden_act": ["gelu"]}, "hidden_act"),
    ({"vision_config__hidden_act": "silu"}, "hidden_act 'silu'"),
    ({"text_config__eos_token_id": 7}, "token 7"),
    ({"text_config__vocab_size": 1000}, "1000 words"),
    ({"text_config__max_position_embeddings": True}, "context_length = True"),
    ({"text_config__vocab_size": 10**18}, "vocab_size = 1000000000000000000"),
    ({"text_config__intermediate_size": None}, "hidden = None"),
]


@pytest.mark.parametrize(("changes", "message"), ODD, ids=[str(case[0]) for case in ODD])
def test_odd_configs_are_refused_with_a_sentence(saved: Path, changes: Any, message: str) -> None:
    text = (saved / "config.json").read_text()
    try:
        rewrite(saved, **changes)
        with pytest.raises(UserError, match=message):
            create_model(f"hf:{saved}")
    finally:
        (saved / "config.json").write_text(text)

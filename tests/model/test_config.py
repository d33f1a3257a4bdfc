"""Config files that name what no model of ours has: refused with a sentence."""

from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import UserError
from cliquetta.model.factory import create_model
from tests._helpers.transformers_models import rewrite

ODD: dict[str, tuple[Any, ...]] = {
    "model_type": ("siglip2", "align", None, ["clip"]),
    "text_config": ("gpt",),
    "vision_config": ([1], None),
    "projection_dim": (None, 0),
    "vision_config__hidden_size": ("64", -64),
    "vision_config__num_attention_heads": (5, 0),
    "vision_config__num_hidden_layers": (10**9, 2.5, 4, 2),
    "vision_config__patch_size": (16, [8, 8], 64),
    "vision_config__image_size": (10**12,),
    "vision_config__layer_norm_eps": ("tiny",),
    "vision_config__hidden_act": (["gelu"], "silu"),
    "text_config__eos_token_id": (7,),
    "text_config__vocab_size": (1000, 10**18),
    "text_config__max_position_embeddings": (True,),
    "text_config__intermediate_size": (None,),
}


@pytest.mark.parametrize(
    ("field", "value"), [(k, v) for k, values in ODD.items() for v in values]
)
def test_odd_configs_are_refused_with_a_sentence(
    saved: Path, field: str, value: Any
) -> None:
    text = (saved / "config.json").read_text()
    try:
        rewrite(saved, **{field: value})
        with pytest.raises(UserError) as error:
            create_model(f"hf:{saved}")
        assert "\n" not in str(error.value)
    finally:
        (saved / "config.json").write_text(text)

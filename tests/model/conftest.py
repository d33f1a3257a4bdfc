"""The shared model with either activation, and models of other libraries to compare with."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cliquetta.model.checkpoints.state import Checkpoint, build, with_activation
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import OpenAIModule
from tests._helpers.transformers_models import tiny_transformers, word_tokenizer


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def clip(request: pytest.FixtureRequest, tiny_clip: CLIP) -> CLIP:
    checkpoint = Checkpoint(
        tiny_clip.config, tiny_clip.state_dict(), "tiny", tiny_clip.preprocess
    )
    return build(with_activation(checkpoint, request.param))


@pytest.fixture(scope="session")
def pixels() -> Tensor:
    """Three images of 32 pixels."""
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def module() -> Any:
    return OpenAIModule()


@pytest.fixture(scope="module")
def gelu_module() -> Any:
    return OpenAIModule(activation="gelu")


@pytest.fixture(scope="module")
def archive(
    module: Any, pixels: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A TorchScript archive, as OpenAI publishes its models."""
    path = tmp_path_factory.mktemp("openai") / "model.pt"
    ids = torch.tensor([[49406, 320, 49407]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, (pixels[:1], ids), check_trace=False).save(str(path))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    tiny_transformers("gelu").save_pretrained(folder)
    create_model(f"hf:{folder}")  # it is readable until a test spoils it
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Any:
    """A tokenizer of transformers with one token per word."""
    word_tokenizer(tmp_path / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )

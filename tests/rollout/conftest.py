"""A tiny random Qwen3 and one real SGLang server for the tests of the rollout room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from knit.config.schema import EngineConf, ModelConf
from knit.recipes.quickstart.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer
from knit.rollout.engine import SGLangServer


def make_tiny_qwen3(folder: Path, seed: int = 0) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.15)  # far from uniform, so that a wrong token shows
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def rollout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "qwen3")


def make_server(model: Path, folder: Path) -> SGLangServer:
    engine = EngineConf(context_length=1024, max_running_requests=64, max_total_tokens=16384)
    return SGLangServer(
        "engine0", engine, ModelConf(path=str(model)), device="cpu", log_path=str(folder / "engine.log")
    )


@pytest.fixture(scope="session")
def rollout_server(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """One running server for all tests that leave it as they found it."""
    server = make_server(rollout_model, tmp_path_factory.mktemp("logs"))
    server.start(str(rollout_model), 0)
    yield server
    server.stop()


@pytest.fixture
def own_server(rollout_model: Path, tmp_path: Path) -> Iterator[SGLangServer]:
    """A server, not started, for a test that kills it."""
    server = make_server(rollout_model, tmp_path)
    yield server
    server.stop()

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


@pytest.fixture(scope="session")
def rollout_server(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    engine = EngineConf(context_length=1024, max_running_requests=64, max_total_tokens=16384, mem_fraction=0.05)
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    server = SGLangServer("engine-0", engine, ModelConf(path=str(rollout_model)), device="cpu", log_path=str(log))
    server.start(str(rollout_model), 0)
    yield server
    server.stop()

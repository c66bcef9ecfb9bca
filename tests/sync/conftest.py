"""A tiny random Qwen3, and two real servers of it for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from knit.config.schema import EngineConf, ModelConf
from knit.rollout.engine import SGLangServer

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def random_model(seed: int):
    """A Qwen3 in fp32 whose next-token distributions are far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15, generator=generator)
    return model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("sync") / "model"
    random_model(0).save_pretrained(path)
    words = {f"<{i}>": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<1>", pad_token="<0>").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def servers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangServer]]:
    logs = tmp_path_factory.mktemp("sync-logs")
    engine = EngineConf(context_length=1024, max_running_requests=32, max_total_tokens=16384, mem_fraction=0.05)
    pair = [
        SGLangServer(
            f"engine-{i}", engine, ModelConf(path=str(model_folder)), device="cpu", log_path=str(logs / f"{i}.log")
        )
        for i in range(2)
    ]
    try:
        for server in pair:
            server.start(str(model_folder), 0)
        yield pair
    finally:
        for server in pair:
            server.stop()

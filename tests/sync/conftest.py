"""A tiny random Qwen3, and two real servers of it for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from knit.config.schema import EngineConf, ModelConf
from knit.rollout.engine import SGLangServer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.sync.reference import VOCAB, random_model

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
    # The threads must outlive the servers: a server dies with the thread that started it.
    with ThreadPoolExecutor(2) as pool:
        try:
            list(pool.map(lambda server: server.start(str(model_folder), 0), pair))
            yield pair
        finally:
            for server in pair:
                server.stop()

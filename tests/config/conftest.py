import copy

import pytest

from knit.config.load import load
from knit.config.schema import KnitConf, SourceConf


@pytest.fixture(scope="session")
def quickstart() -> KnitConf:
    """The quickstart recipe, read once; sealed."""
    return load(["recipe=quickstart"])


@pytest.fixture
def conf(tmp_path) -> KnitConf:
    """A small valid configuration that a test may change before it is checked."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    conf = KnitConf()
    conf.model.path = str(tmp_path)
    conf.track.wandb = "off"
    conf.sources = [
        SourceConf(name="a", ratio=0.5, reward="os.path:join", prompt_source="os.path:join"),
        SourceConf(name="b", ratio=0.25, reward="os.path:join", prompt_source="os.path:join"),
    ]
    return copy.deepcopy(conf)

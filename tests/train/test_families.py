from __future__ import annotations

from typing import Any

import pytest

from knit.errors import ConfigError
from knit.train.families import architecture_of, read_architecture
from tests.train.cases import MODELS


def qwen3(**changes: Any) -> dict[str, Any]:
    return {**MODELS["qwen3"], **changes}


def test_sizes_come_from_the_config() -> None:
    arch = architecture_of(qwen3())
    assert (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.ffn) == (2, 32, 4, 2, 16, 48)


def test_head_dim_and_kv_heads_have_the_defaults_of_hugging_face() -> None:
    config = {k: v for k, v in MODELS["llama"].items() if k not in ("head_dim", "num_key_value_heads")}
    arch = architecture_of(config)
    assert (arch.kv_heads, arch.head_dim) == (4, 8)


def test_rope_is_read_in_both_spellings_of_transformers() -> None:
    new = {k: v for k, v in qwen3().items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert architecture_of(new).rope_base == 5e5
    assert architecture_of(qwen3(rope_theta=1e6)).rope_base == 1e6
    assert architecture_of(MODELS["llama"]).rope_factor == 4.0


def test_every_hugging_face_tensor_is_named_once() -> None:
    names = [prefix + n for rule, _, prefix in architecture_of(qwen3()).rules() for n in rule.hf]
    assert len(names) == len(set(names)) == 1 + 2 * 11 + 2
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"


def test_tied_models_have_no_output_layer_of_their_own() -> None:
    arch = architecture_of(qwen3(tie_word_embeddings=True))
    assert all(rule.hf != ("lm_head.weight",) for rule, _, _ in arch.rules())


def test_the_vocabulary_is_padded_to_the_ranks() -> None:
    arch = architecture_of(qwen3())
    assert [arch.padded_vocab(tp) for tp in (1, 2, 4)] == [97, 98, 100]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type=gpt_neox is not known; known are llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_the_table_does_not_know_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_of(qwen3(**change))


def test_a_folder_without_config_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.*config.json"):
        read_architecture(tmp_path)

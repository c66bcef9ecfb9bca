"""Model families: what of a Hugging Face ``config.json`` Megatron needs, and which tensor is which.

A family is a few facts and a list of :class:`Rule`: the same rules read and write. Nothing of the
architecture is typed a second time; what the table does not know is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from knit.errors import ConfigError


class Split(StrEnum):
    """How a Megatron tensor is made of HF tensors and cut over tensor-parallel ranks."""

    WHOLE = "whole"  # every rank has all of it
    COLUMNS = "columns"  # dimension 1 is cut (row-parallel linear)
    QKV = "qkv"  # three tensors, interleaved by query group: [q.., k, v] per group; groups are cut
    GATED = "gated"  # two tensors, each cut by rows, stacked: [gate; up]
    VOCAB = "vocab"  # rows are cut after padding their number to a multiple of the ranks


@dataclass(frozen=True, slots=True)
class Rule:
    """``megatron`` lists the names the tensor may have (local layers first, Transformer Engine's second)."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class Family:
    """``layer`` are the rules of one decoder layer; the flags are facts that ``config.json`` does not state."""

    model_type: str
    layer: tuple[Rule, ...]
    qk_norm: bool = False
    qkv_bias: bool = False


EMBEDDING = Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Split.VOCAB)
FINAL_NORM = Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Split.WHOLE)
OUTPUT = Rule(("output_layer.weight",), ("lm_head.weight",), Split.VOCAB)

_QKV_HF = tuple(f"self_attn.{x}_proj" for x in "qkv")
_DENSE = (
    Rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
        Split.WHOLE,
    ),
    Rule(("self_attention.linear_qkv.weight",), tuple(f"{x}.weight" for x in _QKV_HF), Split.QKV),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Split.COLUMNS),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
        Split.WHOLE,
    ),
    Rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Split.GATED),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Split.COLUMNS),
)
_QKV_BIAS = (Rule(("self_attention.linear_qkv.bias",), tuple(f"{x}.bias" for x in _QKV_HF), Split.QKV),)
_QK_NORM = tuple(
    Rule((f"self_attention.{x}_layernorm.weight",), (f"self_attn.{x}_norm.weight",), Split.WHOLE) for x in "qk"
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", _DENSE + _QK_NORM, qk_norm=True),
        Family("qwen2", _DENSE + _QKV_BIAS, qkv_bias=True),
        Family("llama", _DENSE),
    )
}

# Settings that change the arithmetic and that no family above implements, with the value that is fine.
_REFUSED = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of one model, read from its ``config.json``."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_base: float
    rope_factor: float | None  # of Llama 3's scaling; None without scaling
    tied: bool

    def rules(self) -> list[tuple[Rule, str, str]]:
        """(rule, prefix in Megatron, prefix in HF) for every tensor of the model, in the order of export."""
        out = [(EMBEDDING, "", "")]
        for i in range(self.layers):
            out += [(rule, f"decoder.layers.{i}.", f"model.layers.{i}.") for rule in self.family.layer]
        out.append((FINAL_NORM, "", ""))
        return out if self.tied else [*out, (OUTPUT, "", "")]

    def padded_vocab(self, tp: int) -> int:
        return -(-self.vocab // tp) * tp


def read_architecture(folder: str | Path) -> Architecture:
    """Reads ``folder/config.json``; raises ConfigError on a missing file, unknown family or unknown setting."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={folder}: it holds no config.json; give the folder of a Hugging Face model")
    return architecture_of(json.loads(path.read_text()), str(path))


def architecture_of(hf: dict[str, Any], where: str = "config.json") -> Architecture:
    kind = hf.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ConfigError(f"{where}: model_type={kind} is not known; known are {', '.join(sorted(FAMILIES))}")
    for key, fine in _REFUSED.items():
        if hf.get(key, fine) != fine and not (key == "attention_bias" and family.qkv_bias):
            raise ConfigError(f"{where}: {key}={hf[key]} is not supported for {kind}; only {key}={fine} is")
    heads = hf["num_attention_heads"]
    rope_base, rope_factor = _rope(hf, where)
    return Architecture(
        family=family,
        layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        ffn=hf["intermediate_size"],
        vocab=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_base=rope_base,
        rope_factor=rope_factor,
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def _rope(hf: dict[str, Any], where: str) -> tuple[float, float | None]:
    """(base, Llama 3 factor). transformers 5 writes ``rope_parameters``, earlier ones two keys."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    # Megatron's rotary embedding fixes these three.
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(rope.get(k) != v for k, v in fixed.items()):
        raise ConfigError(f"{where}: rope scaling {rope} is not supported; only default and llama3 with {fixed} are")
    return base, float(rope["factor"])

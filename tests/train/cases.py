"""What every layout trains on, as numpy: models, sequences, settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knit.config.schema import AlgorithmConf, KnitConf, ModelConf, OptimConf, RolloutConf
from knit.feed.packing import PackedMicro

VOCAB = 97  # odd: padded under tensor parallelism
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MODELS = {
    "qwen3": {**_SIZES, "model_type": "qwen3", "tie_word_embeddings": False},
    "qwen2": {**_SIZES, "model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 8},
    "llama": {
        **_SIZES,
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
LENGTHS = (1, 2, 3, 300, 40, 41, 7, 25, 26, 1, 90, 33)
STEPS = 3
TEMPERATURE = 0.8


def conf(model_path: str, dtype: str = "float32", clip: float = 0.5) -> KnitConf:
    return KnitConf(
        steps=STEPS,
        model=ModelConf(path=model_path, dtype=dtype, init_std=0.05),
        rollout=RolloutConf(temperature=TEMPERATURE),
        algorithm=AlgorithmConf(kl_coef=0.05, entropy_coef=0.02, mismatch_cap=2.0),
        # A large eps: gradients that are rounding noise must not become steps of size lr.
        optim=OptimConf(lr=1e-3, eps=1e-5, weight_decay=0.1, grad_clip=clip, warmup_steps=2),
    )


def sequences(step: int = 0) -> list[dict[str, np.ndarray]]:
    """One dict per sequence; the first third of each is prompt."""
    rng = np.random.default_rng(step)
    out = []
    for length in LENGTHS:
        tokens = rng.integers(0, VOCAB, length)
        labels, mask = np.append(tokens[1:], 0), np.ones(length, np.float32)
        mask[: length // 3], mask[-1] = 0, 0
        out.append(
            {
                "tokens": tokens,
                "positions": np.arange(length),
                "labels": labels,
                "mask": mask,
                "rollout_logprobs": rng.normal(-4.5, 0.6, length).astype(np.float32) * mask,
                "advantages": np.full(length, rng.normal(), np.float32),
                "weights": mask / np.float32(max(1.0, mask.sum())),
                "versions": np.zeros(length, np.int32),
            }
        )
    return out


def pack(rows: Sequence[dict[str, np.ndarray]]) -> PackedMicro:
    empty = sequences()[0]
    fields = {k: np.concatenate([empty[k][:0], *(r[k] for r in rows)]) for k in empty}
    cu = np.cumsum([0] + [len(r["tokens"]) for r in rows]).astype(np.int32)
    return PackedMicro(cu_seqlens=cu, **fields)

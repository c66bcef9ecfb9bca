"""Hugging Face models with plain torch: an independent implementation of what the trainer computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.train import cases


def make_folder(out: Path, name: str) -> None:
    """A HF folder with random weights, norms and biases included."""
    model = _build(name)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if "norm" in key else 0.08 * noise)
    folder = out / name
    model.save_pretrained(folder)
    config = {**cases.MODELS[name], "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def _build(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config, model = kinds[name]
    fields = {k: v for k, v in cases.MODELS[name].items() if k != "model_type"}
    return model(config(**fields))


def load(out: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32, attn_implementation="eager")


def logprobs(model: Any, row: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of the label, entropy) at every position of one sequence."""
    logits = model(torch.as_tensor(row["tokens"])[None]).logits[0] / cases.TEMPERATURE
    full = logits.log_softmax(-1)
    picked = full.gather(1, torch.as_tensor(row["labels"])[:, None])[:, 0]
    return picked, -(full.exp() * full).sum(-1)


def loss(model: Any, rows: list[dict[str, np.ndarray]], conf: Any) -> torch.Tensor:
    """The formula of the policy loss, written out case by case."""
    a, total = conf.algorithm, torch.zeros(())
    for row in rows:
        picked, entropy = logprobs(model, row)
        for t in np.flatnonzero(row["mask"]):
            advantage = float(row["advantages"][t])
            ratio = (picked[t] - float(row["rollout_logprobs"][t])).exp()
            kept = ratio if ratio < a.mismatch_cap else a.mismatch_cap * (picked[t] - picked[t].detach() + 1)
            if (advantage > 0 and kept > 1 + a.clip_high) or (advantage < 0 and kept < 1 - a.clip_low):
                bound = 1 + a.clip_high if advantage > 0 else 1 - a.clip_low
                cost = torch.tensor(-advantage * bound)
            else:
                cost = -advantage * kept
            cost = cost + a.kl_coef * (ratio - 1 - ratio.log()) - a.entropy_coef * entropy[t]
            total = total + cost * float(row["weights"][t])
    return total / len(rows)


def train(model: Any, conf: Any) -> dict[str, Any]:
    """``cases.STEPS`` steps of AdamW; loss, gradient norm and gradients of the first, weights after the last."""
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() == 1]
    o = conf.optim
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )
    out: dict[str, Any] = {}
    for step in range(cases.STEPS):
        optimizer.zero_grad()
        value = loss(model, cases.sequences(step), conf)
        value.backward()
        if step == 0:
            out["loss"] = value.item()
            out["gradients"] = {n: p.grad.numpy().copy() for n, p in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), o.grad_clip)
        out.setdefault("norm", norm.item())
        for group in optimizer.param_groups:
            group["lr"] = o.lr * min(1.0, (step + 1) / o.warmup_steps)
        optimizer.step()
    out["trained"] = {n: p.detach().numpy().copy() for n, p in parameters.items()}
    return out

"""What the tests compare with: a Hugging Face forward, and plain requests to an engine."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

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
PROMPTS = [[5, 17, 33, 2], [40, 41, 42], [90, 3, 8, 8, 12, 61]]


def random_model(seed: int, **shape: int) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 whose next-token distributions are far from uniform."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | shape)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def named_tensors(model):
    return [(name, p.detach()) for name, p in model.named_parameters()]


def generate(url: str, prompts: list[list[int]], tokens: int = 12) -> list[dict]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "return_logprob": True, "sampling_params": sampling}
    reply = httpx.post(f"{url}/generate", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(url: str, prompt: list[int], tokens: int, started: Callable[[], object]) -> dict:
    """One streamed request; calls ``started`` at its first token and returns the last message."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling, "stream": True}
    last = ""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                started()
                last = line.removeprefix("data: ")
    return json.loads(last)


@torch.no_grad()
def reference_logprobs(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def largest_difference(url: str, model) -> float:
    """Between the engine's log-probs of its own samples and those of ``model``."""
    worst = 0.0
    for prompt, reply in zip(PROMPTS, generate(url, PROMPTS), strict=True):
        entries = reply["meta_info"]["output_token_logprobs"]
        expected = reference_logprobs(model, prompt, [t for _, t, *_ in entries])
        worst = max(worst, (torch.tensor([v for v, *_ in entries]) - expected).abs().max().item())
    return worst

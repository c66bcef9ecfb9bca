"""Losses as pure functions of per-token values: no model, no ranks, no normaliser.

A loss returns the weighted *sum* over its tokens, whose gradient is added up over micro-batches, chunks and
ranks and divided once, and raw sums for the metrics. Its path is ``algorithm.loss`` in the configuration:
``f(tokens: Tokens, conf: AlgorithmConf) -> (loss, sums)``. It is called with no tokens at all where a rank
has nothing to train, and must then return the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from knit.config.schema import AlgorithmConf

Sums = dict[str, torch.Tensor]  # metric name -> scalar; the trainer divides by the number of trained tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of one micro-batch, all [N] fp32. ``logprobs`` and ``entropy`` carry gradients."""

    logprobs: torch.Tensor  # under the weights being trained
    entropy: torch.Tensor  # of the full distribution the token was drawn from
    rollout_logprobs: torch.Tensor  # under the weights that sampled the token
    advantages: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return self.logprobs.numel()


LossFn = Callable[[Tokens, AlgorithmConf], tuple[torch.Tensor, Sums]]


def policy_loss(tokens: Tokens, conf: AlgorithmConf) -> tuple[torch.Tensor, Sums]:
    """Clipped surrogate against the sampling policy, per token (GRPO, arXiv 2402.03300; clip-higher of DAPO).

    With r = π/π_rollout, R = min(r, cap) and advantage A, a token costs
    ``-min(R·A, clip(R, 1 - clip_low, 1 + clip_high)·A) + kl_coef·k3 - entropy_coef·H`` times its weight.
    Truncation keeps the gradient alive but bounded: dR = R·dlog π (truncated importance sampling), so that a
    token of negative advantage that the rollout thought improbable cannot blow up the step.
    ``k3 = r - 1 - log r`` is never negative and, as the tokens are drawn from π_rollout, an unbiased estimate
    of KL(π_rollout‖π), and so is its gradient (Schulman, "Approximating KL divergence").
    """
    log_ratio = tokens.logprobs - tokens.rollout_logprobs
    ceiling = math.log(conf.mismatch_cap)
    ratio = _truncate(log_ratio, ceiling).exp()
    clipped = ratio.clamp(1.0 - conf.clip_low, 1.0 + conf.clip_high)
    gain, clipped_gain = ratio * tokens.advantages, clipped * tokens.advantages
    cost = -torch.minimum(gain, clipped_gain)
    k3 = log_ratio.clamp(max=20.0).exp() - 1.0 - log_ratio
    if conf.kl_coef:
        cost = cost + conf.kl_coef * k3
    if conf.entropy_coef:
        cost = cost - conf.entropy_coef * tokens.entropy
    return (cost * tokens.weights).sum(), {
        "train/clip_frac": _count(clipped_gain < gain),
        "train/entropy": _sum(tokens.entropy),
        "train/kl": _sum(k3),
        "mismatch/logprob_abs_diff": _sum(log_ratio.abs()),
        "mismatch/kl": _sum(-log_ratio),
        "mismatch/tis_clip_frac": _count(log_ratio > ceiling),
    }


def sft_loss(tokens: Tokens, conf: AlgorithmConf) -> tuple[torch.Tensor, Sums]:
    """Weighted negative log-likelihood: Σ -weight·log π."""
    return -(tokens.logprobs * tokens.weights).sum(), {"train/entropy": _sum(tokens.entropy)}


def _truncate(log_ratio: torch.Tensor, ceiling: float) -> torch.Tensor:
    """min(log_ratio, ceiling), with the gradient of log_ratio everywhere."""
    return log_ratio - (log_ratio - ceiling).clamp(min=0.0).detach()


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)


def _count(events: torch.Tensor) -> torch.Tensor:
    return events.sum(dtype=torch.float64)

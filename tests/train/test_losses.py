"""The losses against formulas written out in numpy, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from knit.config.schema import AlgorithmConf

pytestmark = pytest.mark.megatron


@pytest.fixture
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    logprobs = rng.normal(-2, 1, 400)
    return {
        "logprobs": logprobs,
        "entropy": rng.uniform(0, 3, 400),
        "rollout_logprobs": logprobs + rng.normal(0, 0.8, 400),
        "advantages": rng.normal(0, 1, 400),
        "weights": rng.uniform(0, 1, 400),
    }


def evaluate(loss: Any, data: dict[str, np.ndarray], conf: AlgorithmConf) -> tuple[float, np.ndarray, dict[str, float]]:
    import torch

    from knit.train.losses import Tokens

    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in data.items()}
    tensors["logprobs"].requires_grad_()
    value, sums = loss(Tokens(**tensors), conf)
    value.backward()
    return value.item(), tensors["logprobs"].grad.numpy(), {k: v.item() for k, v in sums.items()}


def test_policy_loss_and_its_gradient_follow_the_formula(data: dict[str, np.ndarray]) -> None:
    from knit.train.losses import policy_loss

    conf = AlgorithmConf(clip_low=0.2, clip_high=0.28, mismatch_cap=2.0, kl_coef=0.1, entropy_coef=0.03)
    log_ratio = data["logprobs"] - data["rollout_logprobs"]
    ratio, a, w = np.exp(log_ratio), data["advantages"], data["weights"]
    kept = np.minimum(ratio, 2.0)
    gain, bounded = kept * a, np.clip(kept, 0.8, 1.28) * a
    k3 = ratio - 1 - log_ratio
    cost = -np.minimum(gain, bounded) + 0.1 * k3 - 0.03 * data["entropy"]
    slope = np.where(bounded < gain, 0.0, -kept * a) + 0.1 * (ratio - 1)

    value, gradient, sums = evaluate(policy_loss, data, conf)
    assert value == pytest.approx((cost * w).sum(), abs=1e-9)
    assert np.abs(gradient - slope * w).max() < 1e-9
    assert sums["train/clip_frac"] == (bounded < gain).sum()
    assert sums["train/kl"] == pytest.approx(k3.sum())
    assert sums["train/entropy"] == pytest.approx(data["entropy"].sum())
    assert sums["mismatch/logprob_abs_diff"] == pytest.approx(np.abs(log_ratio).sum())
    assert sums["mismatch/kl"] == pytest.approx(-log_ratio.sum())
    assert sums["mismatch/tis_clip_frac"] == (ratio > 2.0).sum() > 0


def test_on_policy_the_gradient_is_the_policy_gradient(data: dict[str, np.ndarray]) -> None:
    from knit.train.losses import policy_loss

    data["rollout_logprobs"] = data["logprobs"].copy()
    _, gradient, sums = evaluate(policy_loss, data, AlgorithmConf())
    assert np.abs(gradient + data["advantages"] * data["weights"]).max() < 1e-12
    assert sums["train/clip_frac"] == sums["mismatch/kl"] == 0


def test_an_absurd_ratio_leaves_loss_and_gradient_finite_and_bounded(data: dict[str, np.ndarray]) -> None:
    from knit.train.losses import policy_loss

    data["rollout_logprobs"] = data["logprobs"] - 500.0
    value, gradient, _ = evaluate(policy_loss, data, AlgorithmConf(mismatch_cap=4.0))
    assert np.isfinite(value)
    assert (np.abs(gradient) <= 4.0 * np.abs(data["advantages"] * data["weights"]) + 1e-12).all()


def test_supervised_loss_is_the_weighted_negative_log_likelihood(data: dict[str, np.ndarray]) -> None:
    from knit.train.losses import sft_loss

    value, gradient, _ = evaluate(sft_loss, data, AlgorithmConf())
    assert value == pytest.approx(-(data["logprobs"] * data["weights"]).sum())
    assert np.abs(gradient + data["weights"]).max() < 1e-12


@pytest.mark.parametrize("name", ["policy_loss", "sft_loss"])
def test_no_tokens_give_zero_and_the_same_keys(name: str, data: dict[str, np.ndarray]) -> None:
    from knit.train import losses

    loss = getattr(losses, name)
    none = {k: v[:0] for k, v in data.items()}
    value, _, sums = evaluate(loss, none, AlgorithmConf())
    assert value == 0.0
    assert sums.keys() == evaluate(loss, data, AlgorithmConf())[2].keys()
    assert not any(sums.values())


def test_entropy_and_log_probability_have_the_gradients_of_autograd() -> None:
    import torch

    from knit.train.logprobs import token_logprobs

    torch.manual_seed(0)
    logits = (3 * torch.randn(20, 11)).requires_grad_()
    labels = torch.randint(0, 9, (20,))
    weights = torch.randn(2, 20)

    full = logits[:, :9].log_softmax(-1)  # two entries of the slice are padding
    expected = torch.stack([full.gather(1, labels[:, None])[:, 0], -(full.exp() * full).sum(-1)])
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    ours = torch.stack(token_logprobs(logits, labels, vocab=9))
    (our_gradient,) = torch.autograd.grad((ours * weights).sum(), logits)
    assert (ours - expected).abs().max() < 2e-6
    assert (our_gradient - gradient).abs().max() < 2e-6


def test_a_certain_token_has_entropy_zero_and_no_nan_gradient() -> None:
    import torch

    from knit.train.logprobs import token_logprobs

    logits = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    logprob, entropy = token_logprobs(logits, torch.tensor([0]), vocab=3)
    (logprob + entropy).sum().backward()
    assert logprob.item() == entropy.item() == 0.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()

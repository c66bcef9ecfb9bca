"""Log-probabilities and entropies of tokens whose logits are split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        peak = logits.amax(-1)
        _reduce(peak, dist.ReduceOp.MAX, group)
        shifted = logits - peak[:, None]
        probs = shifted.exp()
        local = labels - start
        mine = (local >= 0) & (local < logits.size(1))
        local = local.clamp(0, logits.size(1) - 1)[:, None]
        picked = shifted.gather(1, local)[:, 0] * mine
        sums = torch.stack([probs.sum(-1), (probs * shifted).sum(-1), picked])
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, picked = sums.unbind()
        probs.div_(total[:, None])
        entropy = total.log() - weighted / total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(probs, local, mine, entropy)
        return picked - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        probs, local, mine, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        out = torch.zeros_like(probs)
        if of_logprob is not None:  # onehot - p
            out = probs * -of_logprob[:, None]
            out.scatter_add_(1, local, (of_logprob * mine)[:, None])
        if of_entropy is not None:  # -p (log p + H), where 0 log 0 = 0
            out -= of_entropy[:, None] * (torch.special.xlogy(probs, probs) + probs * entropy[:, None])
        return out, None, None, None


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, *, vocab: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of the label, entropy), both fp32 [N] and differentiable, equal on all ranks of ``group``.

    ``logits`` [N, V / ranks] is this rank's slice of the padded vocabulary, of which entries from ``vocab``
    on do not exist; ``labels`` [N] are global ids.
    """
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    start = rank * logits.size(1)
    real = logits[:, : max(1, vocab - start)]
    out: tuple[torch.Tensor, torch.Tensor] = _VocabLogProb.apply(real, labels, start, group if ranks > 1 else None)
    return out


def _reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)

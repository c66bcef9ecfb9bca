"""Runs in the processes of a training world of two: every layout in turn, results to ``<out>/<name>.npz``.

    python -m tests.train.world RANK OUT PORT...

Rank 0 alone does the single-process layout, both do tp = 2 and dp = 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from knit.errors import KnitError, RunError
from knit.feed.packing import PackedMicro
from knit.train import parallel
from knit.train.sft import warm_up
from tests.train import cases

LAYOUTS = {"one": (1, 1), "tp2": (2, 1), "dp2": (1, 2)}
Chunks = list[list[PackedMicro]]


def whole(rows: list[dict], dp_rank: int, dp: int) -> Chunks:
    return [[cases.pack(rows[dp_rank::dp])]]


def many(rows: list[dict], dp_rank: int, dp: int) -> Chunks:
    """Uneven chunks and micro-batches, an empty one among them."""
    mine = rows[dp_rank::dp]
    return [
        [cases.pack(mine[:1]), cases.pack(mine[1:3])],
        [cases.pack([])],
        [cases.pack(mine[3:4]), cases.pack(mine[4:])],
    ]


def lopsided(rows: list[dict], dp_rank: int, dp: int) -> Chunks:
    """The first data-parallel rank has everything, the others nothing."""
    return [[cases.pack(rows if dp_rank == 0 else [])]]


def gradients(trainer: Any) -> dict[str, np.ndarray]:
    """Reduced gradients under HF names, on rank 0."""
    group = trainer._dp_group
    for buffer in trainer.ddp.buffers:
        for bucket in buffer.buckets:  # the distributed optimizer leaves each rank its shard
            shards = list(bucket.grad_data.chunk(group.size()))
            mine = shards[group.rank()].clone()
            dist.all_gather(shards, mine, group=group)
            bucket.grad_data.copy_(torch.cat(shards))
    parameters = list(trainer.model.parameters())
    saved = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.detach().clone()
    out = weights(trainer)
    for p, data in zip(parameters, saved, strict=True):
        p.data = data
    return out


def weights(trainer: Any) -> dict[str, np.ndarray]:
    return {n: t.float().cpu().numpy().copy() for n, t in trainer.named_hf_tensors() if t is not None}


def train(trainer: Any, step: int, split: Callable[..., Chunks]) -> dict[str, float]:
    rows, ranks = cases.sequences(step), trainer.ranks
    trainer.set_progress(step + 1)
    trainer.begin_mini_batch()
    for chunk in split(rows, ranks.dp_rank, ranks.dp):
        trainer.forward_backward(iter(chunk))
    return trainer.finish(float(len(rows)))


def record(metrics: dict[str, float]) -> dict[str, np.ndarray]:
    return {f"metric:{k}": np.array(v) for k, v in metrics.items()}


def run_layout(layout: str, rank: int, out: Path, port: int) -> None:
    from knit.train.trainer import Trainer

    ranks = parallel.Ranks(rank, *LAYOUTS[layout])
    parallel.start(ranks, f"127.0.0.1:{port}", cases.conf(str(out / "qwen3")))

    def save(name: str, data: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(out / f"{layout}.{name}.npz", **data)

    for model in cases.MODELS:
        conf = cases.conf(str(out / model))
        trainer = Trainer(conf, ranks)
        trainer.load_hf(conf.model.path)
        save(f"{model}.loaded", weights(trainer))
        save(f"{model}.logprobs", {"logprobs": trainer.logprobs(cases.pack(cases.sequences()))})
        save(f"{model}.metrics", record(train(trainer, 0, whole)))
        for step in range(1, cases.STEPS):
            train(trainer, step, many)
        save(f"{model}.trained", weights(trainer))
        trainer.save_hf(str(out / f"{layout}.{model}.saved"))

    conf = cases.conf(str(out / "qwen3"), clip=0.0)
    for split in (whole, many, lopsided):
        trainer = Trainer(conf, ranks)
        trainer.load_hf(conf.model.path)
        metrics = train(trainer, 0, split)
        save(f"split.{split.__name__}", {**gradients(trainer), **record(metrics)})

    trainer.init_from_config(conf.model.path, seed=7)
    save("random", weights(trainer))
    save("bf16", bf16(Trainer(cases.conf(str(out / "qwen3"), "bfloat16"), ranks)))
    if layout == "one":
        save("broken", broken(trainer))
        save("host", host())
        save("refusals", {k: np.array(v) for k, v in refusals(out, ranks).items()})
    parallel.stop()


def bf16(trainer: Any) -> dict[str, np.ndarray]:
    """Supervised steps in bf16: losses, and what the first data-parallel rank ends with."""
    trainer.load_hf(trainer.conf.model.path)
    rows = [row["tokens"].tolist() for row in cases.sequences() if len(row["tokens"]) > 2]
    batch = [(tokens[:2], tokens[2:]) for tokens in rows]
    losses = warm_up(trainer, [batch] * 12, max_tokens_per_micro=128)
    total = sum(p.detach().double().sum() for p in trainer.model.parameters())
    spread = torch.stack([total, -total])
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=trainer._dp_group)
    return {"losses": np.array(losses), "replicas_differ_by": spread.sum().numpy(), **weights(trainer)}


def broken(trainer: Any) -> dict[str, np.ndarray]:
    """A gradient that is not finite: the error, and whether a weight changed."""
    before, rows = weights(trainer), cases.sequences()
    rows[3]["advantages"][:] = np.inf
    trainer.set_progress(5)
    trainer.begin_mini_batch()
    trainer.forward_backward([cases.pack(rows)])
    try:
        trainer.finish(1.0)
        message = "no error"
    except RunError as error:
        message = str(error)
    after = weights(trainer)
    return {"message": np.array(message), "unchanged": np.array(all((before[n] == after[n]).all() for n in before))}


def host() -> dict[str, np.ndarray]:
    """What the CPU shim left of the process's torch."""
    from megatron.core.distributed import param_and_grad_buffer

    shimmed = param_and_grad_buffer.torch
    return {
        "torch_is_real": np.array(type(torch.zeros) is type(len) and type(torch.Tensor.type) is type(str.upper)),
        "megatron_sees": np.array(str(shimmed.zeros(1, device="cuda").device)),
        "sglang_imported": np.array("sglang" in sys.modules),
        "same_tensor": np.array(shimmed.Tensor is torch.Tensor),
    }


def refusals(out: Path, ranks: parallel.Ranks) -> dict[str, str]:
    """The messages of bad input, by case."""
    from knit.train.trainer import Trainer

    def trainer(model: str, *, tp: int = 1, **megatron: Any) -> Any:
        conf = cases.conf(str(out / model))
        conf.parallel.megatron = megatron
        return Trainer(conf, parallel.Ranks(0, tp, 1))

    attempts: dict[str, Callable[[], Any]] = {
        "missing_tensor": lambda: trainer("qwen3").load_hf(str(out / "llama")),
        "spare_tensor": lambda: trainer("llama").load_hf(str(out / "qwen3")),
        "shape": lambda: trainer("llama").load_hf(str(out / "qwen2")),
        "unknown_field": lambda: trainer("qwen3", recompute_granularty="full"),
        "indivisible": lambda: trainer("qwen3", tp=3),
        "no_weights": lambda: trainer("qwen3").begin_mini_batch(),
    }
    messages = {}
    for case, attempt in attempts.items():
        try:
            attempt()
            messages[case] = "no error"
        except KnitError as error:
            messages[case] = str(error)
    return messages


def main() -> None:
    rank, out, ports = int(sys.argv[1]), Path(sys.argv[2]), [int(p) for p in sys.argv[3:]]
    for (layout, (tp, dp)), port in zip(LAYOUTS.items(), ports, strict=True):
        if rank < tp * dp:
            run_layout(layout, rank, out, port)


if __name__ == "__main__":
    main()

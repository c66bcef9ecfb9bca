"""Which rank of the training world is what, and Megatron's process groups for it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from knit.config.schema import KnitConf
from knit.errors import ConfigError, RunError
from knit.train import cpu_host


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank layout: tensor-parallel neighbours are adjacent, ``rank = dp_rank * tp + tp_rank``."""

    rank: int = 0
    tp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp


def device_of(conf: KnitConf) -> torch.device:
    """The device this process trains on; raises ConfigError when CUDA is asked for and absent."""
    wanted = conf.cluster.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device=cuda, but torch sees no CUDA device; set cluster.device=cpu or auto")
    if wanted == "cpu" and torch.cuda.is_available():
        raise ConfigError("cluster.device=cpu on a CUDA host: start training workers with CUDA_VISIBLE_DEVICES=''")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def start(ranks: Ranks, address: str, conf: KnitConf) -> None:
    """Join the training world at ``address`` (``host:port``) and build Megatron's groups.

    Gloo on the CPU, NCCL on CUDA; every collective has the deadline ``parallel.timeout_s``. Raises
    RunError when the world does not come together in time.
    """
    torch.set_num_threads(conf.parallel.threads)
    cpu_host.install()
    from megatron.core import parallel_state, tensor_parallel

    timeout = datetime.timedelta(seconds=conf.parallel.timeout_s)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend, init_method=f"tcp://{address}", rank=ranks.rank, world_size=ranks.world, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"training rank {ranks.rank} of {ranks.world} found no world at {address} "
            f"within parallel.timeout_s={conf.parallel.timeout_s:g}: {error}"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks.tp,
        distributed_timeout_minutes=conf.parallel.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(conf.seed, force_reset_rng=True)


def stop() -> None:
    """Leave the world; every group is gone after it."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

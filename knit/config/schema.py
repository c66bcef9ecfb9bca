"""The typed configuration of a run: one dataclass per group, each key documented beneath it.

Resolved once by :mod:`knit.config.load`, never written to afterwards. Unknown keys are refused, except
under ``engine.extra`` and ``parallel.megatron``, which pass through to SGLang and Megatron-core.
Python paths are written ``package.module:name``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ClusterConf:
    address: str | None = None
    """Address of a running Ray cluster to join; null starts a local one that ends with the run."""
    placement: str = "disaggregated"
    device: str = "auto"
    """auto | cpu | cuda"""
    num_cpus: int = 12
    """Logical CPU slots of the local Ray (no pinning: the tiny run shares two real cores)."""
    object_store_gb: float = 2.0
    start_timeout_s: float = 180.0
    """Deadline for Ray, placement groups and actors, each."""


@dataclass
class ModelConf:
    path: str = MISSING
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer.json)."""
    dtype: str = "float32"
    """float32 | bfloat16: the trainer's parameters and the engine's weights."""
    init_std: float = 0.02


@dataclass
class EngineConf:
    count: int = 1
    tp: int = 1
    context_length: int = 4096
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """KV-cache tokens; null lets SGLang choose."""
    mem_fraction: float = 0.8
    start_timeout_s: float = 420.0
    pause_mode: str = "retract"
    """retract | in_place | abort: what a publish does to unfinished requests."""
    threads: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    """Raw SGLang server arguments, e.g. {attention_backend: fa3}."""


@dataclass
class RolloutConf:
    workers: int = 1
    concurrency: int = 128
    """Trajectories in flight per worker."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int = 1024
    agent_loop: str = "knit.rollout.agent:SingleTurn"
    group_filter: str | None = None
    """Python path of ``f(rewards: list[float], prompt) -> str | None``: a reason to drop the group."""
    drop_zero_std: bool = True
    """Drop groups whose rewards are all equal: they carry no gradient."""
    min_group_size: int = 2
    """Fewest usable members for a group to be accepted."""
    trajectory_timeout_s: float = 600.0
    group_timeout_s: float = 1800.0
    """Deadline of a dispatch: beyond it the worker is taken to be stuck and the run ends with the names."""
    max_retries: int = 3
    """Engine failures a trajectory survives; then it is dropped as ``failed``."""
    reward_timeout_s: float = 60.0
    reward_concurrency: int = 64
    max_prompt_failures: int = 3
    """Attempts after which a prompt is quarantined."""


@dataclass
class SourceConf:
    name: str = MISSING
    path: str | None = None
    """JSONL or parquet file; unused by prompt sources that make their own prompts."""
    ratio: float = 0.0
    """Share of the train batch that this source is guaranteed; what the ratios leave is filled freely."""
    reward: str = MISSING
    """Python path of ``f(sample) -> float`` (or async)."""
    prompt_source: str = "knit.rollout.prompts:FileSource"
    prompt_key: str = "prompt"
    label_key: str = "label"
    system_prompt: str | None = None
    chat_template: bool = False
    shuffle: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the prompt source."""


@dataclass
class BatchConf:
    size: int = 256
    """Trajectories per train batch."""
    mini_batches: int = 4
    """Optimizer steps per train batch."""
    group_size: int = 8
    """Trajectories per prompt."""
    max_tokens_per_micro: int = 16384


@dataclass
class AdmissionConf:
    policy: str = "progressive"
    """train_batch | on_completion | linear | no_guards | progressive | balanced"""
    schedule: Any = "relaxed"
    """Target coefficients of the source quotas: linear | relaxed | power:<p> | a list that ends in 1."""
    selection: str = "oldest"
    chunks_per_mini_batch: int = 1
    completion_quota: float = 0.0
    """Least share of every earlier rollout step that must be completed before a train batch closes."""
    max_staleness: int = 1
    """Bound on trajectory staleness at admission; 0 is on-policy."""
    stale_action: str = "drop"
    """drop | relaunch: what happens to ready trajectories beyond the bound."""
    refill_budget: float = 8.0
    """Trajectories that may be dropped in a row, in train batches, before the run gives up."""
    stall_timeout_s: float = 900.0
    """Longest wait for an admission; then the run ends and says what blocks."""


@dataclass
class StoreConf:
    backend: str = "ray"
    max_gb: float = 1.0
    """Payload bytes held before rollout is held back."""
    timeout_s: float = 60.0


@dataclass
class FeedConf:
    timeout_s: float = 120.0


@dataclass
class AlgorithmConf:
    name: str = "grpo"
    advantage: str = "knit.rollout.groups:grpo_advantages"
    """Python path of ``f(rewards: np.ndarray) -> np.ndarray`` over the usable members of one group."""
    loss: str = "knit.train.losses:policy_loss"
    loss_normaliser: str = "trajectory"
    """trajectory: every trajectory weighs the same | token: every token does. Over the mini-batch."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    mismatch_cap: float = 4.0
    """Truncation of the importance ratio to the sampling policy; counted in mismatch/tis_clip_frac."""
    kl_coef: float = 0.0
    """k3 penalty towards the sampling policy."""
    entropy_coef: float = 0.0


@dataclass
class OptimConf:
    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    """Train batches of linear warm-up."""
    schedule: str = "constant"
    """constant | cosine (over the run's steps)"""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0


@dataclass
class ParallelConf:
    tp: int = 1
    dp: int = 1
    threads: int = 1
    """CPU threads per training worker."""
    timeout_s: float = 120.0
    """Deadline of a collective; on gloo a dead peer ends the others within it."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Raw fields of Megatron-core's TransformerConfig."""


@dataclass
class SyncConf:
    transport: str = "distributed"
    """distributed | disk"""
    bucket_mb: float = 512.0
    timeout_s: float = 120.0
    probe: int = 16
    """Trajectories scored by both sides after every publish (mismatch/probe); 0 turns it off."""


@dataclass
class EvalConf:
    before: bool = False
    after: bool = False
    every: int = 0
    """Evaluate every k train batches; 0: never in between."""
    sources: list[SourceConf] = field(default_factory=list)
    name: str = "heldout"
    samples_per_prompt: int = 4
    temperature: float = 1.0
    greedy: bool = False
    """Also report accuracy at temperature 0."""
    limit: int | None = None
    """Problems per source; null: all."""
    timeout_s: float = 900.0


@dataclass
class FaultConf:
    max_engine_restarts: int = 3
    health_interval_s: float = 2.0
    health_timeout_s: float = 10.0
    """A live process that does not answer for this long, three times over, counts as dead."""


@dataclass
class TrackConf:
    dir: str | None = None
    """Run directory; null: runs/<recipe>-<time>."""
    wandb: str = "offline"
    """offline | online | off"""
    project: str = "knit"
    name: str | None = None
    sample_every: int = 10
    """Show a readable trajectory per source every k steps; 0: never."""


@dataclass
class DebugConf:
    mode: str = "none"
    """none | rollout_only (dumps admitted trajectories) | train_only (trains on a dump)"""
    dump: str | None = None
    """Folder of the dump."""


@dataclass
class KnitConf:
    recipe_name: str = "custom"
    prepare: str | None = None
    """Python path of ``f(conf)``, run in a process of its own before the run: makes models or data that
    the recipe needs and does not find."""
    seed: int = 0
    steps: int = 100
    """Train batches."""
    cluster: ClusterConf = field(default_factory=ClusterConf)
    model: ModelConf = field(default_factory=ModelConf)
    engine: EngineConf = field(default_factory=EngineConf)
    rollout: RolloutConf = field(default_factory=RolloutConf)
    sources: list[SourceConf] = field(default_factory=list)
    batch: BatchConf = field(default_factory=BatchConf)
    admission: AdmissionConf = field(default_factory=AdmissionConf)
    store: StoreConf = field(default_factory=StoreConf)
    feed: FeedConf = field(default_factory=FeedConf)
    algorithm: AlgorithmConf = field(default_factory=AlgorithmConf)
    optim: OptimConf = field(default_factory=OptimConf)
    parallel: ParallelConf = field(default_factory=ParallelConf)
    sync: SyncConf = field(default_factory=SyncConf)
    eval: EvalConf = field(default_factory=EvalConf)
    fault: FaultConf = field(default_factory=FaultConf)
    track: TrackConf = field(default_factory=TrackConf)
    debug: DebugConf = field(default_factory=DebugConf)
    prepare_options: dict[str, Any] = field(default_factory=dict)

"""The typed configuration of a run: one dataclass per group, each key documented beneath it.

Resolved once by :mod:`knit.config.load`, never written to afterwards. Unknown keys are refused, except
under ``engine.extra`` and ``parallel.megatron``, which pass through to SGLang and Megatron-core.
Python paths are written ``package.module:name``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING


class Group:
    """A group of settings. Once sealed it cannot be written to, in this process or after pickling."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_sealed"):
            raise AttributeError(f"the configuration is read-only: {type(self).__name__}.{name} cannot be set")
        super().__setattr__(name, value)


G = TypeVar("G", bound=Group)


def seal(group: G) -> G:
    """Makes a group and all groups inside it read-only; returns it."""
    for setting in dataclasses.fields(group):  # type: ignore[arg-type]
        value = getattr(group, setting.name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Group):
                seal(inner)
    group.__dict__["_sealed"] = True
    return group


@dataclass
class ClusterConf(Group):
    address: str | None = None
    """Address of a running Ray cluster to join; null starts a local one that ends with the run."""
    placement: str = "disaggregated"
    """disaggregated: rollout and training have machines of their own and run at the same time."""
    device: str = "auto"
    """auto | cpu | cuda"""
    num_cpus: int = 12
    """Logical CPU slots of the local Ray (no pinning: the tiny run shares two real cores)."""
    object_store_gb: float = 2.0
    """Size of the local Ray object store."""
    start_timeout_s: float = 180.0
    """Deadline for Ray, placement groups and actors, each."""


@dataclass
class ModelConf(Group):
    path: str | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer.json); null where ``prepare`` makes it."""
    dtype: str = "float32"
    """float32 | bfloat16: the trainer's parameters and the engine's weights."""
    init_std: float = 0.02
    """Standard deviation of initial weights, where a weight is made and not loaded."""


@dataclass
class EngineConf(Group):
    count: int = 1
    """SGLang servers."""
    tp: int = 1
    """Tensor parallel size of one server."""
    context_length: int = 4096
    """Longest prompt + response, in tokens."""
    max_running_requests: int = 128
    """Requests a server decodes at the same time."""
    max_total_tokens: int | None = None
    """KV-cache tokens; null lets SGLang choose."""
    mem_fraction: float = 0.8
    """Share of the device memory for weights and KV cache (SGLang: mem_fraction_static)."""
    start_timeout_s: float = 420.0
    """Deadline until a server answers with the model loaded."""
    pause_mode: str = "retract"
    """retract | in_place | abort: what a publish does to unfinished requests."""
    threads: int = 1
    """CPU threads of a server on a CPU host."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Raw SGLang server arguments, e.g. {attention_backend: fa3}."""


@dataclass
class RolloutConf(Group):
    workers: int = 1
    """Rollout worker processes."""
    concurrency: int = 128
    """Trajectories in flight per worker."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the log-probs are of the truncated distribution."""
    max_response_tokens: int = 1024
    """Most sampled tokens of one response; then it counts as truncated."""
    agent_loop: str = "knit.rollout.agent:SingleTurn"
    """Python path of the class that turns a prompt into a trajectory."""
    group_filter: str | None = None
    """Python path of ``f(rewards: list[float], prompt) -> str | None``: a reason to drop the group."""
    drop_zero_std: bool = True
    """Drop groups whose rewards are all equal: they carry no gradient."""
    min_group_size: int = 2
    """Fewest usable members for a group to be accepted."""
    trajectory_timeout_s: float = 600.0
    """A trajectory that takes longer is dropped as ``timeout``; its slot is free again."""
    group_timeout_s: float = 1800.0
    """Deadline of a dispatch: beyond it the worker is taken to be stuck and the run ends with the names."""
    max_retries: int = 3
    """Engine failures a trajectory survives; then it is dropped as ``failed``."""
    reward_timeout_s: float = 60.0
    """Deadline of one call of a reward function."""
    reward_concurrency: int = 64
    """Reward calls in flight per worker."""
    max_prompt_failures: int = 3
    """Attempts after which a prompt is quarantined."""


@dataclass
class SourceConf(Group):
    name: str = MISSING
    """Name in quotas, metrics and overrides (``sources.<name>.ratio=0.5``)."""
    path: str | None = None
    """JSONL or parquet file; unused by prompt sources that make their own prompts."""
    ratio: float = 0.0
    """Share of the train batch that this source is guaranteed; what the ratios leave is filled freely."""
    max_ratio: float = 1.0
    """Largest share of the train batch that this source may take."""
    reward: str = MISSING
    """Python path of ``f(sample) -> float`` (or async)."""
    prompt_source: str = "knit.rollout.prompts:FileSource"
    """Python path of the class that yields prompts."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or chat messages."""
    label_key: str = "label"
    """Column handed to the reward as ``sample.prompt.label``; may be absent."""
    system_prompt: str | None = None
    """Put before every prompt (with chat_template: as the system message)."""
    chat_template: bool = False
    """Render the prompt by the tokenizer's chat template."""
    shuffle: bool = True
    """Shuffle anew in every epoch, by the run's seed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the prompt source."""


@dataclass
class BatchConf(Group):
    size: int = 256
    """Trajectories per train batch."""
    mini_batches: int = 4
    """Optimizer steps per train batch."""
    group_size: int = 8
    """Trajectories per prompt."""
    max_tokens_per_micro: int = 16384
    """Most tokens of a packed micro-batch; a longer sequence gets one of its own."""


@dataclass
class QuotaConf(Group):
    name: str = MISSING
    """Of the quota group, in metrics and messages."""
    by: str = MISSING
    """Python path of ``f(meta: TrajectoryMeta) -> str``: the class of a trajectory."""
    minima: dict[str, Any] = field(default_factory=dict)
    """Class -> least share of the train batch (a float) or least count (an integer)."""
    maxima: dict[str, Any] = field(default_factory=dict)
    """Class -> largest share or count."""


@dataclass
class AdmissionConf(Group):
    policy: str = "progressive"
    """train_batch | on_completion | linear | no_guards | progressive | balanced"""
    schedule: Any = "relaxed"
    """Target coefficients of the source quotas: linear | relaxed | end | power:<p> | a list that ends in 1."""
    schedules: dict[str, Any] = field(default_factory=dict)
    """Schedules of single predicates: a source's name or ``completion``, each as in ``schedule``."""
    quotas: list[QuotaConf] = field(default_factory=list)
    """Further quota groups beside the sources: other attributes of a trajectory that need a share."""
    selection: str = "oldest"
    """oldest (launch) | fifo (first ready) | longest: which ready trajectories a batch prefers."""
    chunks_per_mini_batch: int = 1
    """Parts in which a mini-batch may be admitted and trained; gradients accumulate. 1: the paper."""
    completion_quota: float = 0.0
    """Least share of every earlier rollout step that must be completed before a train batch closes."""
    max_staleness: int = 1
    """Bound on trajectory staleness at admission; 0 is on-policy."""
    max_ahead: float | None = None
    """Train batches that rollout may be ahead of what training needs next; null: as far as max_staleness allows.
    What is sampled early only grows stale, so the least that keeps the engines busy is best; 0 is none."""
    stale_action: str = "drop"
    """drop | relaunch: what happens to ready trajectories beyond the bound."""
    refill_budget: float = 8.0
    """Trajectories that may be dropped in a row, in train batches, before the run gives up."""
    stall_timeout_s: float = 900.0
    """Longest wait for an admission; then the run ends and says what blocks."""


@dataclass
class StoreConf(Group):
    backend: str = "ray"
    """ray: the Ray object store."""
    max_gb: float = 1.0
    """Payload bytes held before rollout is held back."""
    timeout_s: float = 60.0
    """Deadline of one read or write."""


@dataclass
class FeedConf(Group):
    timeout_s: float = 120.0
    """Deadline of fetching and packing one chunk."""


@dataclass
class AlgorithmConf(Group):
    name: str = "grpo"
    """grpo"""
    advantage: str = "knit.rollout.groups:grpo_advantages"
    """Python path of ``f(rewards: np.ndarray) -> np.ndarray`` over the usable members of one group."""
    loss: str = "knit.train.losses:policy_loss"
    """Python path of the policy loss, run in the training workers."""
    loss_normaliser: str = "trajectory"
    """trajectory: every trajectory weighs the same | token: every token does. Over the mini-batch."""
    clip_low: float = 0.2
    """The ratio to the sampling policy is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high."""
    mismatch_cap: float = 4.0
    """Truncation of the importance ratio to the sampling policy; counted in mismatch/tis_clip_frac."""
    kl_coef: float = 0.0
    """k3 penalty towards the sampling policy."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""


@dataclass
class OptimConf(Group):
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a cosine schedule."""
    warmup_steps: int = 0
    """Train batches of linear warm-up."""
    schedule: str = "constant"
    """constant | cosine (over the run's steps)"""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass
class ParallelConf(Group):
    tp: int = 1
    """Tensor parallel size of training."""
    dp: int = 1
    """Data parallel size of training."""
    threads: int = 1
    """CPU threads per training worker."""
    timeout_s: float = 120.0
    """Deadline of a collective; on gloo a dead peer ends the others within it."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Raw fields of Megatron-core's TransformerConfig."""


@dataclass
class SyncConf(Group):
    transport: str = "distributed"
    """distributed | disk"""
    bucket_mb: float = 512.0
    """Tensors are sent together in buckets of about this size."""
    timeout_s: float = 120.0
    """Deadline of one publish."""
    probe: int = 16
    """Trajectories scored by both sides after every publish (mismatch/probe); 0 turns it off."""


@dataclass
class EvalConf(Group):
    before: bool = False
    """Evaluate the initial weights."""
    after: bool = False
    """Evaluate the final weights."""
    every: int = 0
    """Evaluate every k train batches; 0: never in between."""
    sources: list[SourceConf] = field(default_factory=list)
    """Held-out sources; their ratios are ignored."""
    name: str = "heldout"
    """Name of the evaluation set in ``eval/<set>/avg_at_n``."""
    samples_per_prompt: int = 4
    """n of avg_at_n."""
    temperature: float = 1.0
    """Sampling temperature of avg_at_n."""
    greedy: bool = False
    """Also report accuracy at temperature 0."""
    limit: int | None = None
    """Problems per source; null: all."""
    timeout_s: float = 900.0
    """Deadline of one evaluation."""


@dataclass
class CheckpointConf(Group):
    final: bool = True
    """Write the trained model to RUN/weights/final, in Hugging Face format."""


@dataclass
class FaultConf(Group):
    max_engine_restarts: int = 3
    """Restarts of one server before the run gives up."""
    max_worker_restarts: int = 3
    """Rollout workers that may die and be replaced, over the whole run."""
    health_interval_s: float = 2.0
    """Pause between health checks of a server."""
    health_timeout_s: float = 10.0
    """A live process that does not answer for this long, three times over, counts as dead."""


@dataclass
class TrackConf(Group):
    dir: str | None = None
    """Run directory; null: runs/<recipe>-<time>."""
    wandb: str = "offline"
    """offline | online | off"""
    project: str = "knit"
    """wandb project."""
    name: str | None = None
    """wandb run name; null: the name of the run directory."""
    sample_every: int = 10
    """Show a readable trajectory per source every k steps; 0: never."""


@dataclass
class DebugConf(Group):
    mode: str = "none"
    """none | rollout_only (dumps admitted trajectories) | train_only (trains on a dump)"""
    dump: str | None = None
    """Folder of the dump."""


@dataclass
class KnitConf(Group):
    recipe_name: str = "custom"
    """Set by ``recipe=NAME``; part of the run directory's name."""
    prepare: str | None = None
    """Python path of ``f(conf) -> dict``, run in a process of its own before the run: makes models or data that the
    recipe needs and does not find, and returns the settings it decided, e.g. ``{"model.path": ...}``."""
    seed: int = 0
    """Seed of prompt order and initial weights. Sampling on the servers is not seeded."""
    steps: int = 100
    """Train batches."""
    cluster: ClusterConf = field(default_factory=ClusterConf)
    """Machines and Ray."""
    model: ModelConf = field(default_factory=ModelConf)
    """The policy."""
    engine: EngineConf = field(default_factory=EngineConf)
    """SGLang servers."""
    rollout: RolloutConf = field(default_factory=RolloutConf)
    """Workers that turn prompts into rewarded trajectories."""
    sources: list[SourceConf] = field(default_factory=list)
    """Training sources."""
    batch: BatchConf = field(default_factory=BatchConf)
    """Sizes of a train batch and its parts."""
    admission: AdmissionConf = field(default_factory=AdmissionConf)
    """When trajectories enter training."""
    store: StoreConf = field(default_factory=StoreConf)
    """Where trajectory payload lies."""
    feed: FeedConf = field(default_factory=FeedConf)
    """From store to training input."""
    algorithm: AlgorithmConf = field(default_factory=AlgorithmConf)
    """Advantage and loss."""
    optim: OptimConf = field(default_factory=OptimConf)
    """AdamW and its schedule."""
    parallel: ParallelConf = field(default_factory=ParallelConf)
    """Layout of training."""
    sync: SyncConf = field(default_factory=SyncConf)
    """Weight publishing."""
    eval: EvalConf = field(default_factory=EvalConf)
    """Held-out evaluation."""
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    """What is kept of the weights."""
    fault: FaultConf = field(default_factory=FaultConf)
    """Restarts and health checks."""
    track: TrackConf = field(default_factory=TrackConf)
    """Metrics and the run directory."""
    debug: DebugConf = field(default_factory=DebugConf)
    """Rollout or training alone."""
    prepare_options: dict[str, Any] = field(default_factory=dict)
    """For the ``prepare`` function."""
    prepare_timeout_s: float = 1800.0
    """Deadline of the ``prepare`` function."""

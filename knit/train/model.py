"""Builds the Megatron model, its data-parallel wrapper and its optimizer from a HF folder's architecture."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from knit.config.schema import KnitConf, OptimConf
from knit.errors import ConfigError
from knit.train.convert import mark_shards
from knit.train.families import Architecture
from knit.train.layers import PackedAttention, TorchRMSNorm
from knit.train.parallel import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(conf: KnitConf) -> torch.dtype:
    if conf.model.dtype not in DTYPES:
        raise ConfigError(f"model.dtype={conf.model.dtype}: use one of {', '.join(DTYPES)}")
    return DTYPES[conf.model.dtype]


def transformer_config(arch: Architecture, ranks: Ranks, conf: KnitConf) -> TransformerConfig:
    """Raises ConfigError where the sizes don't divide or ``parallel.megatron`` names an unknown field."""
    for name, size in (("attention heads", arch.heads), ("key-value heads", arch.kv_heads), ("ffn size", arch.ffn)):
        if size % ranks.tp:
            raise ConfigError(f"parallel.tp={ranks.tp} does not divide the model's {name} ({size})")
    on_cpu, dtype = not torch.cuda.is_available(), dtype_of(conf)
    fields: dict[str, Any] = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "layernorm_epsilon": arch.norm_eps,
        "qk_layernorm": arch.family.qk_norm,
        "add_qkv_bias": arch.family.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": ranks.tp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights always come from a folder or from init_from_config, which does not depend on the layout.
        "perform_initialization": False,
        "use_cpu_initialization": on_cpu,
        # Losses are sums; the one division is in Trainer.finish. Must be set before DDP is built.
        "calculate_per_token_loss": True,
        # Fusions that need CUDA kernels or a compiler.
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    for key in conf.parallel.megatron:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"parallel.megatron.{key} is not a field of Megatron's TransformerConfig{hint}")
    return TransformerConfig(**{**fields, **conf.parallel.megatron})


def uses_transformer_engine() -> bool:
    return torch.cuda.is_available() and HAVE_TE


def rotary_frequencies(arch: Architecture, device: torch.device) -> torch.Tensor | None:
    """[head_dim / 2] for the layouts that the local layers read; None where Megatron rotates by itself."""
    if uses_transformer_engine():
        return None
    embedding = RotaryEmbedding(**_rotary(arch), kv_channels=arch.head_dim, rotary_percent=1.0)
    return embedding.inv_freq.to(device)


def _rotary(arch: Architecture) -> dict[str, Any]:
    return {
        "rotary_base": arch.rope_base,
        "rope_scaling": arch.rope_factor is not None,
        "rope_scaling_factor": arch.rope_factor or 1.0,
    }


def build_model(arch: Architecture, config: TransformerConfig) -> GPTModel:
    """Uninitialised parameters on this process's device."""
    model = GPTModel(
        config,
        _layers(arch, config),
        vocab_size=arch.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope" if uses_transformer_engine() else "none",
        **_rotary(arch),
    )
    mark_shards(model, arch)
    return model.cuda() if torch.cuda.is_available() else model


def _layers(arch: Architecture, config: TransformerConfig) -> Any:
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.family.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.family.qk_norm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if arch.family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=TorchRMSNorm)


def wrap(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """Gradients accumulate in fp32 buffers and are reduced once, when the trainer finishes a mini-batch."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(ddp: DistributedDataParallel, conf: OptimConf, dtype: torch.dtype) -> MegatronOptimizer:
    """Adam with decoupled weight decay, sharded over DP; fp32 main parameters where the model is bf16."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=conf.lr,
            min_lr=conf.min_lr,
            weight_decay=conf.weight_decay,
            adam_beta1=conf.beta1,
            adam_beta2=conf.beta2,
            adam_eps=conf.eps,
            clip_grad=conf.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:  # what Megatron's scheduler would do: none for norms and biases
        group["weight_decay"] = conf.weight_decay * group["wd_mult"]
    return optimizer

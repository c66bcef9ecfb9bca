"""Linear-attention kernels, bound by ``srt/layers/attention/linear/{gdn,kda}_backend.py`` at import. None is called
by models with softmax attention."""

from sgl_kernel._missing import missing

chunk_gated_delta_rule_cpu = missing("mamba.chunk_gated_delta_rule_cpu")
causal_conv1d_fn_cpu = missing("mamba.causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = missing("mamba.causal_conv1d_update_cpu")

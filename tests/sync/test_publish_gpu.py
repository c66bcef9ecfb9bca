"""The same over NCCL: the trainer's tensors on one GPU, an engine on another."""

from __future__ import annotations

import pytest

from knit.config.schema import EngineConf, ModelConf, SyncConf
from knit.rollout.engine import SGLangServer
from knit.sync.publisher import WeightPublisher
from tests.sync.reference import largest_difference, named_tensors, random_model

pytestmark = [pytest.mark.gpu, pytest.mark.sglang]


def test_weights_reach_an_engine_over_nccl(model_folder, tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    engine = EngineConf(context_length=1024, mem_fraction=0.3, extra={"base_gpu_id": 1})
    model_conf = ModelConf(path=str(model_folder))
    server = SGLangServer("engine-0", engine, model_conf, device="cuda", log_path=str(tmp_path / "engine.log"))
    conf = SyncConf(bucket_mb=0.04, timeout_s=60.0)
    publisher = WeightPublisher(
        conf, pause_mode="retract", model_path=model_folder, folder=tmp_path / "weights", device="cuda:0"
    )
    try:
        address = server.start(str(model_folder), 0)
        for seed in (1, 2):
            model = random_model(seed)
            publisher.publish(seed, ((n, t.to("cuda:0")) for n, t in named_tensors(model)), [address])
            assert largest_difference(address.url, model) < 1e-3
    finally:
        publisher.close()
        server.stop()

"""What every test shares: markers, order, and the things that are started once for the whole run.

A test without a marker of ours is a ``unit`` test: no Ray, no engine, a minute at most. The others come after,
cheapest first, so that a broken rule shows before a server is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

# Before anything imports torch or Ray: one thread each (many processes share few cores), nothing fetched.
os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
os.environ.setdefault("WANDB_MODE", "offline")

STAGES = ("unit", "megatron", "ray", "sglang", "e2e")
UNIT_TIMEOUT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(marker) for marker in (*STAGES, "slow", "gpu")):
            item.add_marker("unit")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))
    items.sort(key=_stage)  # stable: files stay together
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda_device():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; nvidia-smi lists none"))


def _stage(item: pytest.Item) -> int:
    """The latest stage of a test's markers; a test that is only slow or gpu comes last."""
    stages = [number for number, marker in enumerate(STAGES) if item.get_closest_marker(marker)]
    return max(stages, default=len(STAGES))


def _has_cuda_device() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=60)
    return "GPU 0" in listed.stdout


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """The local Ray of this test run."""
    from knit.cluster import Cluster
    from knit.config.schema import ClusterConf

    cluster = Cluster(ClusterConf(object_store_gb=0.5))
    yield
    cluster.close()

"""Packaging of knit. Light control-plane packages are required; the engines are extras, imported only where used.

Exact versions live in ``requirements/`` and are what ``scripts/_setup.sh`` installs.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "knit/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("knit/__init__.py has no __version__")
    return found.group(1)


ENGINES = [
    "megatron-core==0.16.1",
    "ray[default]==2.60.0",
    "safetensors",
    "sglang==0.5.23",
    "torch>=2.13",
    "transformers==5.19.0",
    "wandb",
]

setup(
    name="knit",
    version=version(),
    description="Reinforcement learning for large language models on a disaggregated cluster",
    python_requires=">=3.11",
    packages=find_packages(include=["knit", "knit.*"]),
    package_data={"knit": ["config/**/*.yaml"]},
    entry_points={"console_scripts": ["knit=knit.cli:main"]},
    install_requires=[
        "aiohttp",
        "httpx",
        "hydra-core>=1.3.2",
        "jinja2",
        "numpy",
        "omegaconf>=2.3",
        "orjson",
        "psutil",
        "pydantic",
        "rich",
        "tokenizers",
        "xxhash",
    ],
    extras_require={
        "engines": ENGINES,
        "gpu": [*ENGINES, "mooncake-transfer-engine", "transformer-engine[pytorch]"],
        "recipes": ["pyarrow", "reasoning-gym"],
        "test": ["hypothesis", "mypy", "pytest", "pytest-asyncio", "pytest-timeout", "ruff"],
    },
)

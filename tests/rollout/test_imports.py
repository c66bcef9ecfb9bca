from __future__ import annotations

import subprocess
import sys

MODULES = (
    "knit.rollout.worker",
    "knit.rollout.engine",
    "knit.rollout.rewards",
    "knit.recipes.quickstart.tasks",
    "knit.recipes.quickstart.warmup",
)


def test_the_rollout_side_imports_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys, {', '.join(MODULES)}\n"
        "from knit.recipes.quickstart.tasks import items; items('gcd', 'train')\n"
        "import tokenizers, jinja2\n"
        "print([m for m in ('torch', 'transformers', 'sglang') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"

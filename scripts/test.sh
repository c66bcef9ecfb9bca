#!/usr/bin/env bash
# Sets up what is missing, checks lint, format and types, then runs the tests:
#   bash scripts/test.sh                       everything but `slow`; `gpu` tests are skipped without a CUDA device
#   bash scripts/test.sh -m unit               under a minute
#   bash scripts/test.sh tests/buffer -k guard any pytest arguments; a later -m replaces the default one
#   bash scripts/test.sh -m slow               the long checks
# The checks always run first (seconds: mypy keeps a cache), and no test runs while one of them fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
knit_setup || exit
cd "$KNIT_ROOT"

failed=0
"$KNIT_VENV/bin/ruff" check . || failed=1
"$KNIT_VENV/bin/ruff" format --check . || failed=1
"$KNIT_VENV/bin/mypy" || failed=1
[ "$failed" = 0 ] || exit 1

exec "$KNIT_VENV/bin/python" -m pytest -m "not slow" "$@"

#!/usr/bin/env bash
# Sets up what is missing, then trains the quickstart: `bash scripts/quickstart.sh [overrides…]`.
# Overrides are those of `knit train`, for instance steps=20 or admission.policy=train_batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
knit_setup || exit
exec "$KNIT_VENV/bin/knit" train recipe=quickstart "$@"

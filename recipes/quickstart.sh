#!/usr/bin/env bash
# Trains a tiny policy on four tasks of reasoning-gym, on CPUs, in a few minutes. Settings: knit/config/recipe/quickstart.yaml
# Usage: bash recipes/quickstart.sh [key=value …], e.g. bash recipes/quickstart.sh seed=1 admission.policy=train_batch
set -euo pipefail

knit train recipe=quickstart "$@"

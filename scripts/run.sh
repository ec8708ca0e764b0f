#!/usr/bin/env bash
# Sets the project up, then runs its main job: four ranks replay a chat workload and check every byte they get back.
# Arguments are passed on to `replay`, later ones win:  bash scripts/run.sh trace.jsonl --requests 500 --world-size 2
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
export RAY_USAGE_STATS_ENABLED=0

# The installed command rather than `python -m cluster`: a folder named `cluster` where the caller stands would win.
exec "$root/.venv/bin/lmcache-ray" replay --world-size 4 --verify --json "$@"

#!/usr/bin/env bash
# Sets the project up, then checks all of it: ruff, mypy, every test.
# With arguments it runs pytest alone and passes them on:  bash scripts/test.sh tests/unit -k topology
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
cd "$root"
export RAY_USAGE_STATS_ENABLED=0
python="$root/.venv/bin/python"

if [[ $# -eq 0 ]]; then
    "$python" -m ruff check .
    "$python" -m mypy
fi
exec "$python" -m pytest "$@"

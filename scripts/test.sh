#!/usr/bin/env bash
# Sets the project up, then checks all of it: ruff, mypy, every test.
# With arguments it runs pytest alone and passes them on:  bash scripts/test.sh tests/unit -k topology
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
cd "$root"
export RAY_USAGE_STATS_ENABLED=0
python="$root/.venv/bin/python"

if [[ $# -gt 0 ]]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check .
"$python" -m mypy
# What needs no Ray runs on every core; then what does, which is one Ray after the other on any number of them.
failed=0
"$python" -m pytest -n auto --maxprocesses 8 --dist loadfile --ignore tests/on_ray || failed=$?
"$python" -m pytest tests/on_ray || failed=$?
exit "$failed"

#!/usr/bin/env bash
# Sets the project up, then checks all of it: ruff, mypy, every test. The last lines say how each part of the tests has
# ended; any exit code but 0 is a failure.
# With arguments it runs pytest alone and passes them on:  bash scripts/test.sh tests/unit -k topology
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
cd "$root"
export RAY_USAGE_STATS_ENABLED=0
unset PYTHONDONTWRITEBYTECODE # else each of the hundreds of processes that tests start compiles the project anew
python="$root/.venv/bin/python"

if [[ $# -gt 0 ]]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check .
"$python" -m mypy

trap "exit 130" INT # and not on with the next part
summary="" failed=0
run_tests() { # run_tests NAME ARGUMENTS...: both parts are run, whether the first has failed or not
    local name="$1" status=0
    shift
    "$python" -m pytest "$@" || status=$?
    if [[ $status -eq 0 ]]; then
        summary+="$name: passed"$'\n'
    else
        summary+="$name: FAILED, pytest ended with $status (see its summary above)"$'\n'
        failed=$status
    fi
}

# What needs no Ray runs on every core, whole files in the order of their names: the longest are not the last. Then comes
# what needs Ray, one test after the other: each is several processes already.
run_tests "tests without Ray" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --ignore tests/on_ray
run_tests "tests on Ray" tests/on_ray
printf '%s' "$summary"
exit "$failed"

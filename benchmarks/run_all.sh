#!/usr/bin/env bash
# Sets the project up, runs the six benchmarks one after the other, and writes the tables of docs/performance.md.
# Leave the machine alone meanwhile: about 15 minutes, 6 GiB of memory, 2 of disk. What a script printed stays in
# benchmarks/results/NAME.json; one that fails is named at the end, and its table stays as it was.
#
#   bash benchmarks/run_all.sh [--quick] [--peer-python FILE] [--trace FILE] [--only NAME,NAME]
#
#   --quick             fewer rounds: a test of the scripts
#   --peer-python FILE  an interpreter that has LMCache (benchmarks/README.md)
#   --trace FILE        what replay.py runs; without it a generated chat workload
#   --only NAMES        of engine,cluster,broadcast,index_scale,disk,replay
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
results="$root/benchmarks/results"
names="engine,cluster,broadcast,index_scale,disk,replay"
only="$names"
quick=()
peer=()
trace=()

fail() {
    echo "run_all: $*" >&2
    exit 2
}

while [[ $# -gt 0 ]]; do
    case "$1" in
        --quick) quick=(--quick) ;;
        --peer-python | --trace | --only)
            [[ $# -ge 2 ]] || fail "$1 needs a value"
            case "$1" in
                --peer-python) peer=(--peer-python "$2") ;;
                --trace) [[ -f "$2" ]] || fail "--trace $2: no such file"; trace=("$(realpath "$2")") ;;
                --only) only="$2" ;;
            esac
            shift ;;
        *) fail "$1: unknown; accepted: --quick, --peer-python FILE, --trace FILE, --only NAMES" ;;
    esac
    shift
done
for name in ${only//,/ }; do
    [[ ",$names," == *",$name,"* ]] || fail "--only $name: unknown; there are $names"
done

bash "$root/scripts/setup.sh"
export RAY_USAGE_STATS_ENABLED=0
python="$root/.venv/bin/python"
mkdir -p "$results"

failed=()
for name in ${only//,/ }; do
    arguments=(${quick[@]+"${quick[@]}"})
    case "$name" in
        engine | cluster | disk) arguments+=(${peer[@]+"${peer[@]}"}) ;;
        replay) arguments+=(${trace[@]+"${trace[@]}"}) ;;
    esac
    echo "run_all: $name ${arguments[*]-}" >&2
    if "$python" "$root/benchmarks/$name.py" ${arguments[@]+"${arguments[@]}"} >"$results/$name.json.new"; then
        mv "$results/$name.json.new" "$results/$name.json"
    else
        rm -f "$results/$name.json.new"
        failed+=("$name")
    fi
done

"$python" "$root/benchmarks/report.py" "$results"
[[ ${#failed[@]} -eq 0 ]] || { echo "run_all: failed: ${failed[*]}" >&2; exit 1; }

#!/usr/bin/env bash
# Runs scripts/run_cluster.py as a Ray job: sets the project up, submits, follows the log, exits as the job did.
# Arguments are passed on:  bash scripts/submit_job.sh --world-size 4 --use-mla --json
#
# The job goes to the Ray whose dashboard RAY_API_SERVER_ADDRESS names (http://host:port), else to the one whose
# dashboard answers on this machine's port 8265, else to a head that this script starts on free ports of the loopback
# interface and ends again. It ends nothing that it did not start: no `ray stop`, which would end every Ray here.
#
# Authentication. Ray 2.60 protects a cluster by a token, but its clients use one only if RAY_AUTH_MODE=token is set for
# them too. The head that is started here gets a token of its own, in a file that only you can read and that is gone
# afterwards. For a Ray that runs already, have its token in ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
export PATH="$root/.venv/bin:$PATH" # of the head too, so `python` is the project's in the job
export RAY_USAGE_STATS_ENABLED=0
job="lmcache-ray-$(date +%Y%m%d-%H%M%S)-$$"
scratch="" # set while a head of ours runs
head_pid=""
submitter="" # set while a job of ours runs

say() { echo "submit_job: $*" >&2; }

answers() { # answers URL: whether a Ray dashboard is there, with or without the right token
    python - "$1/api/version" <<'PY'
import sys, urllib.error, urllib.request
try:
    sys.exit(b"ray_version" not in urllib.request.urlopen(sys.argv[1], timeout=3).read())
except urllib.error.HTTPError as error:
    sys.exit(error.code != 401)
except (OSError, ValueError):
    sys.exit(1)
PY
}

free_ports() { # four different ports, outside 10002-19999, where Ray puts its workers
    python - <<'PY'
import socket
sockets = []
while len(sockets) < 4:
    candidate = socket.create_server(("127.0.0.1", 0))
    if not 10002 <= candidate.getsockname()[1] <= 19999:
        sockets.append(candidate)
print(*(found.getsockname()[1] for found in sockets))
PY
}

start_head() {
    local port client_port agent_port dashboard_port
    scratch="$(mktemp -d /tmp/lmr-XXXXXX)" # short, as sockets lie in it; readable by its owner only
    python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$scratch/token"
    unset RAY_ADDRESS RAY_AUTH_TOKEN
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$scratch/token"
    read -r port dashboard_port client_port agent_port < <(free_ports)
    address="http://127.0.0.1:$dashboard_port"
    say "starting a Ray head with its dashboard on $address"
    set -m # job control: the head becomes a process group of its own
    ray start --head --block --node-ip-address=127.0.0.1 --port="$port" --dashboard-host=127.0.0.1 \
        --dashboard-port="$dashboard_port" --ray-client-server-port="$client_port" \
        --dashboard-agent-listen-port="$agent_port" --num-cpus=4 --object-store-memory=268435456 \
        --temp-dir="$scratch/ray" </dev/null >"$scratch/head.log" 2>&1 &
    head_pid=$!
    set +m
    for _ in {1..120}; do
        ! answers "$address" || return 0
        kill -0 "$head_pid" 2>/dev/null || break
        sleep 1
    done
    cat "$scratch/head.log" >&2
    say "the Ray head did not start; what it said stands above"
    return 1
}

stop_head() { # in order, then, after 20 s, whatever of its process group is left
    kill -TERM "$head_pid" 2>/dev/null || true
    for _ in {1..200}; do
        kill -0 -- "-$head_pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$head_pid" 2>/dev/null || true
}

clean_up() {
    local status=$?
    trap '' INT TERM # once is enough
    if [[ -n "$submitter" ]]; then # interrupted: the job is ours, so it ends
        say "stopping the job $job"
        kill "$submitter" 2>/dev/null || true
        ray job stop --address "$address" "$job" >/dev/null 2>&1 || true
    fi
    [[ -z "$head_pid" ]] || stop_head
    [[ -z "$scratch" ]] || rm -rf "$scratch"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

address="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
if [[ -n "${RAY_API_SERVER_ADDRESS:-}" ]] || answers "$address"; then
    say "using the Ray at $address"
    if [[ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" || -n "${RAY_AUTH_TOKEN:-}" ]]; then
        export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    fi
else
    start_head
fi

# The upload leaves out what .gitignore and .rayignore name, such as .venv.
ray job submit --address "$address" --submission-id "$job" --working-dir "$root" -- \
    python scripts/run_cluster.py "$@" &
submitter=$! # in the background, because a trap waits for what runs in the foreground
wait "$submitter" || true

# `ray job submit` turns every failure into 1, and a stopped job into 0: ask what it was.
python - "$address" "$job" <<'PY' && status=0 || status=$?
import sys
from ray.job_submission import JobSubmissionClient
address, job = sys.argv[1:]
try:
    info = JobSubmissionClient(address).get_job_info(job)
except RuntimeError as error:
    sys.exit(f"submit_job: the job {job} was not accepted: {error}")
print(f"submit_job: the job {job} ended as {info.status}: {info.message}", file=sys.stderr)
sys.exit(0 if info.status == "SUCCEEDED" else info.driver_exit_code or 1)
PY
submitter=""
exit "$status"

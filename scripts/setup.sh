#!/usr/bin/env bash
# Creates .venv in the repository's root and installs the project, pinned by constraints.txt, with its development
# tools. Does nothing when that is done already; an interrupted set-up is begun anew. Works from any folder.
# PYTHON=/path/to/python chooses the interpreter; otherwise the first of `candidates` that fits is taken.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.installed"         # says what is installed: written last, so it is never there too early
unfinished="$venv/.installing"   # there while packages may be half written
candidates=(python3 python3.13 python3.12 python3.11 python3.10)

fail() {
    echo "setup: $*" >&2
    exit 1
}

runs() { # runs PYTHON CODE: whether that interpreter exists and CODE passes
    "$1" -c "$2" >/dev/null 2>&1
}

find_python() {
    local candidate without_venv=""
    for candidate in ${PYTHON:+"$PYTHON"} "${candidates[@]}"; do
        if ! runs "$candidate" 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            [[ "$candidate" != "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON is not a Python of version 3.10 or newer."
        elif runs "$candidate" 'import ensurepip, venv'; then
            echo "$candidate"
            return
        else
            without_venv="${without_venv:-$candidate}"
        fi
    done
    [[ -z "$without_venv" ]] || fail "$without_venv has no venv module; install it (on Debian and Ubuntu:" \
        "apt-get install python3-venv) and run this again."
    fail "no Python of version 3.10 or newer found (tried ${candidates[*]}); install one, or name it: PYTHON=/path."
}

# One set-up at a time; a second one waits, then finds nothing left to do.
if command -v flock >/dev/null; then
    exec 9<"$root/pyproject.toml"
    if ! flock --nonblock 9; then
        echo "setup: waiting for another set-up of $root" >&2
        flock 9
    fi
fi

python="$(find_python)"
version="$("$python" -c 'import platform; print(platform.python_implementation(), platform.python_version())')"
# The root is in it because a moved .venv, and an editable install of a moved folder, are broken.
wanted="$("$python" - "$version" "$root" "$root/pyproject.toml" "$root/constraints.txt" "$root"/lmcache_ray/{,*/}*.c <<'PY'
import hashlib, pathlib, sys
version, root, *files = sys.argv[1:]
contents = [pathlib.Path(file).read_bytes() for file in files]
print(hashlib.sha256(b"\0".join([version.encode(), root.encode(), *contents])).hexdigest())
PY
)"

if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]] && runs "$venv/bin/python" 'import sys'; then
    exit 0
fi

same_python="import platform, sys, pip
sys.exit(f'{platform.python_implementation()} {platform.python_version()}' != '$version')"
if [[ -e "$unfinished" ]] || ! runs "$venv/bin/python" "$same_python"; then
    echo "setup: creating $venv with $version" >&2
    "$python" -m venv --clear "$venv"
fi

echo "setup: installing the packages that constraints.txt pins (a few minutes the first time)" >&2
rm -f "$stamp"
touch "$unfinished"
# The root itself goes on the path: import hooks would lose to a folder named lmcache_ray, such as a clone's own.
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
    -c "$root/constraints.txt" --config-settings editable_mode=compat -e "$root[dev]" ||
    fail "pip could not install the packages; its message stands above."
rm -f "$unfinished"
echo "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"

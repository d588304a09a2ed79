#!/usr/bin/env bash
# Make a virtual environment with everything that a machine without a GPU needs.
#
#     bash tools/setup.sh [VENV]      VENV defaults to .venv; PYTHON chooses the interpreter (3.11 or 3.12)
#
# Quick when nothing changed: a stamp in the environment holds the digest of what it was made from.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$(realpath -m "${1:-$root/.venv}")"
stamp="$venv/prime_hpc.stamp"
extras="wandb,plot,router,dev"
inputs=("$root"/pyproject.toml "$root"/requirements/*.txt "$root"/tools/setup.sh)

find_uv() {
    local private="${XDG_CACHE_HOME:-$HOME/.cache}/prime_hpc/uv"
    if command -v uv; then
        return
    fi
    if [[ ! -x "$private/bin/uv" ]]; then
        python3 -c 'import ensurepip' 2>/dev/null || {
            echo "setup: python3 cannot make virtual environments; run 'apt-get install python3-venv', or install uv" >&2
            exit 1
        }
        python3 -m venv "$private"
        "$private/bin/python" -m pip install --quiet uv >&2
    fi
    echo "$private/bin/uv"
}

# Folders of wheels that pip is told of are news to uv. A CPU build of torch may lie there.
wheel_folders() {
    if [[ -n "${PIP_FIND_LINKS:-}" ]]; then
        echo "$PIP_FIND_LINKS"
    else
        python3 -m pip config get global.find-links 2>/dev/null || true
    fi
}

torch_options() {
    local folder tag
    tag="$("$venv/bin/python" -c 'import sys; print(f"cp3{sys.version_info.minor}")')"
    for folder in $(wheel_folders); do
        printf -- '--find-links\n%s\n' "$folder"
        if compgen -G "$folder/torch-*+cpu-$tag-*.whl" >/dev/null; then
            local found=yes
        fi
    done
    if [[ -z "${found:-}" ]]; then
        printf -- '--torch-backend\ncpu\n'
    fi
}

digest="$(cd "$root" && { echo "$root"; cat "${inputs[@]}"; } | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$stamp" 2>/dev/null)" == "$digest" ]]; then
    exit 0
fi

echo "setup: installing into $venv, which takes a minute or more, and 2.8 GB"
uv="$(find_uv)"
if [[ ! -x "$venv/bin/python" ]]; then
    "$uv" venv --quiet --python "${PYTHON:->=3.11,<3.13}" "$venv"
fi
mapfile -t options < <(torch_options)
if [[ ! -t 2 ]]; then
    options+=(--quiet) # nobody watches the progress, and what is left of it is a line for every package
fi
# Start-up of an engine is a minute longer without compiled bytecode.
"$uv" pip install --python "$venv/bin/python" --compile-bytecode "${options[@]}" \
    --overrides "$root/requirements/overrides-cpu.txt" \
    --requirements "$root/requirements/cpu.txt" \
    --editable "$root[$extras]"
echo "$digest" >"$stamp"

#!/usr/bin/env bash
# Set up, lint, check types, run the tests that need no GPU. Those that need Slurm start one of their own from Debian's
# packages, which root gets installed here.
#
#     bash tools/test.sh [PYTEST ARGUMENTS]     e.g. bash tools/test.sh -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_slurm() {
    local packages
    mapfile -t packages <tools/slurm_sandbox/packages.txt
    if dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
        return
    fi
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "test: without Slurm the tests that need it are skipped; on Debian, root installs it with:" >&2
        echo "    apt-get install --no-install-recommends ${packages[*]}" >&2
        return
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${packages[@]}" >/dev/null
}

bash tools/setup.sh
install_slurm || echo "test: could not install Slurm; the tests that need it are skipped" >&2
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
mypy
# Folders in order: files with whole runs come first, and many short ones at the end, so that both workers end together.
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" "$@"

#!/usr/bin/env bash
# Set up, lint, check types, run the tests that need neither a GPU nor a Slurm controller.
#
#     bash tools/test.sh [PYTEST ARGUMENTS]     e.g. bash tools/test.sh -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
mypy
exec python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu and not slurm" "$@"

#!/usr/bin/env bash
# The whole pipeline on two CPU cores: teach a tiny model to reverse words, first from examples, then by reward.
#
#     bash tools/demo.sh [SEED]       SEED defaults to 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${1:-0}"
tag="demo-seed$seed-$(date +%Y%m%d-%H%M%S)"
model="models/$tag"
bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

echo "demo: 1/3 making a 0.9M-parameter model and its examples in $model"
python -m tools.make_reverse_text --out "$model" --seed "$seed"

echo "demo: 2/3 SFT warm-up until it reverses about a quarter of the words"
python -m prime_hpc.launch +experiment=reverse_text_sft_cpu launcher=local seed="$seed" run.name="$tag-sft" \
    model.path="$model" trainer.sft.data="$model/sft.jsonl"

echo "demo: 3/3 asynchronous RL"
python -m prime_hpc.launch +experiment=reverse_text_cpu launcher=local seed="$seed" run.name="$tag-rl" \
    model.path="outputs/$tag-sft/model"

python -m tools.show_summary "outputs/$tag-rl"

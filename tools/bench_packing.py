"""How full and how even the packer's rows are, and how long it takes: `python -m tools.bench_packing`.

Lengths are log-normal (median 2048, sigma 1), clipped to a row. `fill` is real tokens over the tokens of all rows,
`bound` the most that any packing into equal numbers of rows a rank can reach, `balance` the busiest rank's FLOPs over
the mean, `in step` the share of time that no rank waits if all meet after every row.
"""

import argparse
import time
from functools import partial

import numpy as np

from prime_hpc.algorithms.packing import Cost, arrange
from prime_hpc.models.spec import train_flops

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""A dense decoder of 8 billion parameters."""


def lognormal_lengths(count: int, row: int, seed: int = 0) -> list[int]:
    """`count` lengths in tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(2048), 1.0, size=count)
    return drawn.clip(1, row).astype(int).tolist()


def measure(lengths: list[int], ranks: int, row: int, cost: Cost) -> dict[str, float]:
    """Quality of one arrangement and the seconds it took."""
    start = time.perf_counter()
    arranged = arrange(lengths, ranks, row, cost)
    seconds = time.perf_counter() - start
    work = np.array([[cost([lengths[i] for i in r]) if r else 0.0 for r in rows] for rows in arranged])
    fewest = -(-sum(lengths) // (row * ranks)) * ranks
    return {
        "rows": work.size,
        "fill": sum(lengths) / (work.size * row),
        "bound": sum(lengths) / (fewest * row),
        "balance": work.sum(1).max() / work.sum(1).mean(),
        "in step": work.sum() / (ranks * work.max(0).sum()),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--row", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 1024, 4096, 20_000, 100_000])
    options = parser.parse_args()
    print(f"{'samples':>8} {'rows':>6} {'fill':>7} {'bound':>7} {'balance':>8} {'in step':>8} {'seconds':>8}")
    for count in options.samples:
        found = measure(lognormal_lengths(count, options.row), options.ranks, options.row, partial(train_flops, SHAPE))
        print(f"{count:8d} {found['rows']:6.0f} {found['fill']:7.4f} {found['bound']:7.4f} {found['balance']:8.5f} "
              f"{found['in step']:8.4f} {found['seconds']:8.2f}")  # fmt: skip


if __name__ == "__main__":
    main()

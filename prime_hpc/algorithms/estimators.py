"""Estimators of an evaluation from several rollouts of each task."""

import math
from collections.abc import Iterable, Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k rollouts is right, from c right ones of n: `1 - C(n-c, k) / C(n, k)`, unbiased
    (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: not 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of k rollouts are right, `C(c, k) / C(n, k)`, unbiased (tau-bench; Yao et al. 2024, arXiv
    2406.12045).

    Raises:
        ValueError: not 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def estimates(tasks: Iterable[Sequence[float]]) -> dict[str, float]:
    """Means over tasks, each given by the rewards of its rollouts: `avg@n`, where n is the most that a task has; and if
    every reward is 0 or 1, `pass@k` and `pass^k` for k = 1, 2, 4, ... up to n, over the tasks with at least k."""
    tasks = [rewards for rewards in tasks if len(rewards)]
    if not tasks:
        return {}
    most = max(len(rewards) for rewards in tasks)
    found = {f"avg@{most}": _mean([_mean(rewards) for rewards in tasks])}
    if any(reward not in (0, 1) for rewards in tasks for reward in rewards):
        return found
    for k in (2**i for i in range(most.bit_length())):
        counts = [(len(rewards), int(sum(rewards)), k) for rewards in tasks if len(rewards) >= k]
        found[f"pass@{k}"] = _mean([pass_at_k(*count) for count in counts])
        found[f"pass^{k}"] = _mean([pass_hat_k(*count) for count in counts])
    return found


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"{c} right of {n} rollouts say nothing about {k}: 0 <= c <= n and 1 <= k <= n are needed")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

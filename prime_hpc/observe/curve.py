"""The reward curve of a run as a picture."""

import importlib.util
import logging
from pathlib import Path

import numpy as np

from prime_hpc.observe.monitor import read_metrics

REWARD = "train/all/reward"
WINDOW = 5
"""Steps that the smooth line averages."""

log = logging.getLogger(__name__)


def draw_reward_curve(metrics_path: Path, out_png: Path, title: str) -> Path | None:
    """Draw the mean reward of each step, and its trailing average.

    Returns:
        `out_png`, or None where there is no reward to draw or matplotlib is not installed; the log says which.
    """
    rows = read_metrics(metrics_path).items()
    points = [(step, row[REWARD]) for step, row in rows if row.get(REWARD) is not None]
    if not points:
        log.info("no reward curve: %s has no %s", metrics_path, REWARD)
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no reward curve: matplotlib is missing; pip install 'prime-hpc[plot]'")
        return None
    _draw(np.array(points, dtype=np.float64), out_png, title)
    return out_png


def _draw(points: np.ndarray, out_png: Path, title: str) -> None:
    from matplotlib.figure import Figure

    steps, rewards = points.T
    smooth = [rewards[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, label="mean of the batch")
    axes.plot(steps, smooth, color="tab:blue", label=f"average of the last {WINDOW} steps")
    axes.set(title=title, xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out_png, dpi=120)

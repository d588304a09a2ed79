"""Credit assignment of one source: from the groups of a batch to an advantage for every sampled token."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from prime_hpc.algorithms import advantages
from prime_hpc.algorithms.filters import trains, without_zero_advantage
from prime_hpc.algorithms.imports import import_function
from prime_hpc.algorithms.routing import route
from prime_hpc.algorithms.shaping import shaped_rewards
from prime_hpc.algorithms.trajectories import Trajectory
from prime_hpc.config.algorithm import (
    GRPO,
    RAE,
    RLOO,
    AlgorithmConfig,
    CustomAlgorithm,
    HierarchicalGRPO,
    MaxRL,
    ReinforcePlusPlus,
)
from prime_hpc.transport.messages import Sample

Group = Sequence[Trajectory]
Value = float | Sequence[float] | np.ndarray
"""Advantage of a trajectory: one number, or one for each of its sampled tokens, samples one after another."""


class CreditAssigner:
    """The algorithm of a source. Only self-play (`rae`) remembers anything from batch to batch."""

    def __init__(self, config: AlgorithmConfig):
        self._config = config
        self._baselines: dict[str, float] = {}

    def assign(self, groups: Sequence[Group]) -> list[list[Sample]]:
        """The samples of every group with their advantages; `groups` are those of one batch, in order.

        Raises:
            ValueError: a reward that is not finite, or values of a custom algorithm that do not fit its trajectories.
        """
        for trajectory in (t for group in groups for t in group):
            if not np.isfinite(trajectory.reward):
                raise ValueError(f"rewards must be finite, {trajectory.episode} has {trajectory.reward}: failed "
                                 "rollouts have no place in a group")  # fmt: skip
        if self._config.component != "rl":
            return [[route(sample, self._config.component) for t in group for sample in t.samples]
                    for group in groups]  # fmt: skip
        values = self._values(groups)
        return [[sample for t, v in zip(group, of_group, strict=True) for sample in spread(t, v)]
                for group, of_group in zip(groups, values, strict=True)]  # fmt: skip

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold: the baseline of each agent."""
        return dict(self._baselines)

    def restore(self, state: dict[str, float]) -> None:
        self._baselines = dict(state)

    def _values(self, groups: Sequence[Group]) -> Sequence[Iterable[Value]]:
        config = self._config
        rewards = [shaped_rewards(group, config.length_penalty) for group in groups]
        match config:
            case GRPO():
                return [advantages.grpo(r, config.std) for r in rewards]
            case MaxRL():
                return [advantages.max_rl(r) for r in rewards]
            case RLOO():
                return [advantages.rloo(r) for r in rewards]
            case ReinforcePlusPlus():
                return advantages.reinforce_pp(rewards, config.baseline)
            case RAE():
                return [advantages.rae(r, [t.agent for t in group], self._baselines, config.decay)
                        for r, group in zip(rewards, groups, strict=True)]  # fmt: skip
            case HierarchicalGRPO():
                return [advantages.among_peers(r, [_peers(t, config.episode_agents) for t in group])
                        for r, group in zip(rewards, groups, strict=True)]  # fmt: skip
            case CustomAlgorithm():
                return _custom(config)(groups, rewards, **config.kwargs)
        raise TypeError(f"{config.name} makes no advantages")


def informative(group: Group, config: AlgorithmConfig) -> bool:
    """Whether a finished group would train anything, seen by itself: what to ask before a group counts towards a batch
    that is filled up with others in place of those without a signal. Algorithms that do not compare a group, and so
    give every reward an advantage, say yes to any that is not empty."""
    if not group or not config.compares_group:
        return bool(group)
    [samples] = CreditAssigner(config).assign([group])
    return any(trains(without_zero_advantage(sample)[0]) for sample in samples)


def spread(trajectory: Trajectory, value: Value) -> list[Sample]:
    """The samples of a trajectory with its advantage on their sampled tokens.

    Raises:
        ValueError: a list whose length is not the number of sampled tokens.
    """
    values = np.asarray(value, dtype=np.float64)
    if values.ndim == 0:
        return [advantages.with_advantage(sample, float(values)) for sample in trajectory.samples]
    if len(values) != trajectory.sampled_tokens:
        raise ValueError(f"{len(values)} advantages do not align with the {trajectory.sampled_tokens} sampled tokens "
                         f"of {trajectory.agent or 'the agent'} in {trajectory.episode}")  # fmt: skip
    ends = np.cumsum([int(sample.mask.numpy().sum()) for sample in trajectory.samples])
    parts = np.split(values, ends[:-1])
    return [advantages.with_advantage(sample, part) for sample, part in zip(trajectory.samples, parts, strict=True)]


def _peers(trajectory: Trajectory, episode_agents: list[str]) -> tuple[str, str | None]:
    """Whom a trajectory is compared with: its agent over the group, or within the episode alone."""
    return trajectory.agent, trajectory.episode if trajectory.agent in episode_agents else None


def _custom(config: CustomAlgorithm) -> Callable[..., Sequence[Iterable[Value]]]:
    expected = "`module.function` that takes groups of Trajectory and their rewards and returns advantages"
    return import_function(config.import_path, "algorithm.import_path", expected)

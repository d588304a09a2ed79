"""Credit assignment of a source: trajectories of its groups, algorithms by configuration, memory of self-play."""

import msgspec
import numpy as np
import pytest

from prime_hpc.algorithms.credit import CreditAssigner, informative
from prime_hpc.algorithms.trajectories import Trajectory, trajectories
from prime_hpc.config.algorithm import (
    GRPO,
    RAE,
    RLOO,
    AlgorithmConfig,
    CustomAlgorithm,
    HierarchicalGRPO,
    LinearLengthPenalty,
    MaxRL,
    ReinforcePlusPlus,
)
from prime_hpc.errors import ConfigurationError
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Rollout, Sample, Seat


def sample(name: str, mask: tuple[int, ...] = (0, 1, 1), **streams: Array) -> Sample:
    n = len(mask)
    return Sample(sample_id=name, source="a", token_ids=Array.of(range(n), "i4"), mask=Array.of(mask, "bool"),
                  logprobs=Array.of([0] * n, "f4"), versions=Array.of([0] * n, "i8"), **streams)  # fmt: skip


def solo(reward: float, episode: str = "e", agent: str = "", samples: int = 1, tokens: int = 2) -> Trajectory:
    made = tuple(sample(f"{episode}/{agent}{i}") for i in range(samples))
    return Trajectory(reward, agent, episode, 1, tokens, 1, made)


def values(config: AlgorithmConfig, groups: list[list[Trajectory]]) -> list[list[float]]:
    """The advantage of the first sampled token of each sample, by group."""
    assigned = CreditAssigner(config).assign(groups)
    return [[float(s.advantages.numpy()[1]) for s in samples] for samples in assigned]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPO(), [[0.5, -0.5], [0.0, 0.0, 0.0]]),
        (GRPO(std=True), [[1.0, -1.0], [0.0, 0.0, 0.0]]),
        (MaxRL(), [[1.0, -1.0], [0.0, 0.0, 0.0]]),
        (RLOO(), [[1.0, -1.0], [0.0, 0.0, 0.0]]),
        (ReinforcePlusPlus(), [[1.5811, -1.5811], [0.0, 0.0, 0.0]]),
        (RAE(decay=0.5), [[1.0, -0.5], [0.75, 0.375, 0.1875]]),
        (GRPO(length_penalty=LinearLengthPenalty()), [[0.5, -0.5], [0.0, 0.0, 0.0]]),
    ],
    ids=lambda v: v.name if hasattr(v, "name") else "",
)
def test_groups_of_a_batch(config: AlgorithmConfig, expected: list[list[float]]) -> None:
    groups = [[solo(1.0), solo(0.0)], [solo(1.0), solo(1.0), solo(1.0)]]
    for found, wanted in zip(values(config, groups), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("config", [GRPO(), MaxRL(), RLOO(), ReinforcePlusPlus()])
def test_the_order_of_rollouts_and_groups_does_not_matter(config: AlgorithmConfig) -> None:
    rng = np.random.default_rng(0)
    groups = [[solo(float(r)) for r in rng.random(4)] for _ in range(3)]
    straight = values(config, groups)
    turned = values(config, [group[::-1] for group in groups[::-1]])
    assert [g[::-1] for g in turned[::-1]] == [pytest.approx(g, rel=1e-6) for g in straight]


def test_a_longer_answer_pays_for_its_length() -> None:
    penalty = LinearLengthPenalty(output_weight=0.5, input_weight=0, turn_weight=0)
    [[short, long]] = values(GRPO(length_penalty=penalty), [[solo(1.0, tokens=10), solo(1.0, tokens=20)]])
    assert (short, long) == pytest.approx((0.125, -0.125))


def test_all_branches_of_a_trajectory_carry_its_advantage() -> None:
    assert values(GRPO(), [[solo(1.0, samples=2), solo(0.0)]]) == [[0.5, 0.5, -0.5]]


def test_self_play_remembers_baselines_across_batches_and_restarts() -> None:
    first = CreditAssigner(RAE(decay=0.5))
    first.assign([[solo(1.0, agent="white"), solo(-1.0, agent="black")]])
    assert first.state() == {"white": 0.5, "black": -0.5}
    second = CreditAssigner(RAE(decay=0.5))
    second.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state())))
    [samples] = second.assign([[solo(1.0, agent="white"), solo(-1.0, agent="black")]])
    assert [s.advantages.numpy()[1] for s in samples] == [0.5, -0.5]
    assert CreditAssigner(GRPO()).state() == {}


def test_solvers_are_compared_within_an_episode_and_proposers_over_the_group() -> None:
    group = [solo(0.2, "e1", "proposer"), solo(1.0, "e1", "solver"), solo(0.0, "e1", "solver"),
             solo(0.6, "e2", "proposer"), solo(1.0, "e2", "solver"), solo(1.0, "e2", "solver")]  # fmt: skip
    found = values(HierarchicalGRPO(episode_agents=["solver"]), [group])
    assert found == [pytest.approx([-0.2, 0.5, -0.5, 0.2, 0.0, 0.0])]


def test_the_seats_of_a_rollout_are_its_trajectories() -> None:
    seats = [Seat(agent="white", reward=1.0, num_samples=2, num_turns=3, prompt_tokens=7, completion_tokens=4),
             Seat(agent="black", reward=-1.0, num_samples=1)]  # fmt: skip
    rollout = Rollout(rollout_id="r", source="a", task_id="t", reward=0.0, seats=seats,
                      samples=[sample("0"), sample("1"), sample("2")])  # fmt: skip
    white, black = trajectories(rollout)
    assert [s.sample_id for s in white.samples] == ["0", "1"] and [s.sample_id for s in black.samples] == ["2"]
    assert (white.reward, white.turns, white.prompt_tokens, white.completion_tokens) == (1.0, 3, 7, 4)
    assert (black.agent, black.reward, black.episode) == ("black", -1.0, "r")


def test_a_seat_whose_turn_never_came_enters_no_baseline() -> None:
    seats = [Seat(agent="white", reward=-1.0, num_samples=1), Seat(agent="black", reward=1.0, num_samples=0)]
    rollout = Rollout(rollout_id="r", source="a", task_id="t", reward=0.0, seats=seats, samples=[sample("0")])
    assigner = CreditAssigner(RAE(decay=0.5))
    assigner.assign([trajectories(rollout)])
    assert assigner.state() == {"white": -0.5}


def test_a_rollout_without_seats_is_one_trajectory() -> None:
    rollout = Rollout(rollout_id="r", source="a", task_id="t", reward=0.5, num_turns=2, prompt_tokens=3,
                      completion_tokens=4, samples=[sample("0")])  # fmt: skip
    assert trajectories(rollout) == [Trajectory(0.5, "", "r", 3, 4, 2, (rollout.samples[0],))]


def test_what_has_no_finite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="r failed"):
        trajectories(Rollout(rollout_id="r", source="a", task_id="t"))
    with pytest.raises(ValueError, match="finite"):
        CreditAssigner(GRPO()).assign([[solo(float("nan"))]])


def best_token(groups, rewards, bonus: float):
    """A custom algorithm with an advantage of its own for every token."""
    assert [len(g) for g in groups] == [len(r) for r in rewards]
    return [[np.arange(t.sampled_tokens) + bonus * r for t, r in zip(g, rs, strict=True)]
            for g, rs in zip(groups, rewards, strict=True)]  # fmt: skip


def too_short(groups, rewards):
    return [[[1.0] for _ in group] for group in groups]


def test_a_custom_algorithm_may_tell_tokens_apart() -> None:
    config = CustomAlgorithm(import_path=f"{__name__}.best_token", kwargs={"bonus": 10.0})
    [samples] = CreditAssigner(config).assign([[solo(1.0, samples=2), solo(0.0)]])
    assert [s.advantages.numpy().tolist() for s in samples] == [[0, 10, 11], [0, 12, 13], [0, 0, 1]]


def test_a_custom_algorithm_must_fit_and_exist() -> None:
    with pytest.raises(ValueError, match="align"):
        CreditAssigner(CustomAlgorithm(import_path=f"{__name__}.too_short")).assign([[solo(1.0)]])
    with pytest.raises(ConfigurationError, match="algorithm.import_path"):
        CreditAssigner(CustomAlgorithm(import_path="no.such.module")).assign([[solo(1.0)]])


def test_a_group_without_a_signal_is_not_informative() -> None:
    assert not informative([solo(1.0), solo(1.0)], GRPO())
    assert not informative([], GRPO())
    assert informative([solo(1.0), solo(0.0)], GRPO())
    assert informative([solo(1.0), solo(1.0)], RAE())
    echo = sample("s", ce_weights=Array.of([0.1, 0, 0], "f4"))
    assert informative([Trajectory(1.0, "", "e", 1, 2, 1, (echo,))], GRPO())

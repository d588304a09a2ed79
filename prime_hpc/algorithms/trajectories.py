"""What credit assignment sees: each agent's way through each episode, with its reward and its samples."""

from dataclasses import dataclass

from prime_hpc.transport.messages import Rollout, Sample


@dataclass(frozen=True)
class Trajectory:
    """One agent's part in one episode. `samples` are its branches; lengths are in tokens."""

    reward: float
    agent: str
    episode: str
    prompt_tokens: int
    completion_tokens: int
    turns: int
    samples: tuple[Sample, ...]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that get an advantage, over all samples."""
        return sum(int(sample.mask.numpy().sum()) for sample in self.samples)


def trajectories(rollout: Rollout) -> list[Trajectory]:
    """The trajectories of a rollout: one for each seat that sampled anything, or the whole rollout where seats were not
    told apart. A seat whose turn never came did nothing for its reward, which therefore enters no baseline.

    Raises:
        ValueError: the rollout has no reward.
    """
    if rollout.reward is None:
        raise ValueError(f"{rollout.rollout_id} failed: it has no reward and no place in a group")
    if not rollout.seats:
        return [Trajectory(rollout.reward, "", rollout.rollout_id, rollout.prompt_tokens, rollout.completion_tokens,
                           rollout.num_turns, tuple(rollout.samples))]  # fmt: skip
    played, start = [], 0
    for seat in rollout.seats:
        samples = tuple(rollout.samples[start : start + seat.num_samples])
        start += seat.num_samples
        if samples:
            played.append(Trajectory(seat.reward, seat.agent, rollout.rollout_id, seat.prompt_tokens,
                                     seat.completion_tokens, seat.num_turns, samples))  # fmt: skip
    return played

"""The verifiers taskset and environment of `kuhn_poker`."""

import random
from collections.abc import Iterator, Sequence
from itertools import permutations

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.kuhn_poker.game import MOVES, blunders, forfeit, payoff

CARDS = ("jack", "queen", "king")
SEATS = ("first", "second")
RULES = ("Kuhn poker: three cards, jack < queen < king, one each. Both have put in 1; a bet is 1 more. You play {seat} "
         "and hold the {card}. {before}Reply with one word: {moves}.")  # fmt: skip


class KuhnPokerConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of deals."""
    seed: int = 0
    """Seed of the deals."""
    prompt: str = RULES
    """What a player is told at a turn: `{seat}`, `{card}`, `{before}` (moves so far) and `{moves}` (open ones)."""


class KuhnPokerData(vf.TaskData):
    """One deal: the cards of both, 0 to 2."""

    cards: tuple[int, int]


class KuhnPokerTask(vf.Task[KuhnPokerData, vf.State]):
    """Win from the other seat. Rewards are set at the end of the game."""


class KuhnPokerTaskset(vf.Taskset[KuhnPokerTask, KuhnPokerConfig]):
    """Random deals."""

    def load(self) -> Iterator[KuhnPokerTask]:
        generator, deals = random.Random(self.config.seed), list(permutations(range(len(CARDS)), 2))
        for i in range(self.config.num_tasks):
            yield KuhnPokerTask(KuhnPokerData(id=str(i), cards=generator.choice(deals)), self.config.task)


class KuhnPokerHarness(ChatHarness):
    """One move a turn."""


class KuhnPokerEnvConfig(vf.EnvConfig):
    """Both seats."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    """Passes moves from seat to seat; what one wins the other loses."""

    async def run(self, task: KuhnPokerTask, agents: vf.Agents) -> None:
        cards, history = task.data.cards, list[str]()
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            won = await self._play(cards, (first, second), history)
        for player, (seat, sign) in enumerate(((first, 1), (second, -1))):
            seat.trace.record_reward("payoff", sign * won / 2)
            seat.trace.record_metrics(blunders(cards[player], player, history))

    async def _play(self, cards: tuple[int, int], seats: tuple[vf.Interaction, vf.Interaction],
                    history: list[str]) -> int:  # fmt: skip
        """What the first player wins; moves are added to `history`."""
        while moves := MOVES.get(" ".join(history)):
            player = len(history) % 2
            segment = await seats[player].turn(told(self.taskset.config.prompt, cards[player], player, history, moves))
            history.append(segment.last_reply.strip().strip(".").lower())
            if history[-1] not in moves:
                return forfeit(player)
        return payoff(cards, history)


def told(prompt: str, card: int, player: int, history: Sequence[str], moves: tuple[str, str]) -> str:
    """What a player is told at a turn."""
    before = f"So far: {', '.join(history)}. " if history else ""
    values = {"seat": SEATS[player], "card": CARDS[card], "before": before, "moves": " or ".join(moves)}
    for name, value in values.items():
        prompt = prompt.replace(f"{{{name}}}", value)
    return prompt

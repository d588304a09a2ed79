"""The verifiers taskset and environment of `proposer_solver`."""

import asyncio
import random
from collections.abc import Iterator
from statistics import fmean

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.proposer_solver.sums import random_sum, value_of


class ProposerSolverConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the numbers that a sum has to hold."""
    largest: int = Field(99, ge=1)
    """Largest of them."""
    given: bool = False
    """Draw the sums too, of two numbers each: the solver plays alone, measured on what no proposer has chosen."""
    propose: str = "Write a sum with + - * and whole numbers that holds {number}. Reply with the sum alone."
    """What the proposer is told; `{number}` stands for the number."""
    solve: str = "{sum} = ? Reply with the number alone."
    """What the solver is told; `{sum}` stands for the sum."""


class ProposerSolverData(vf.TaskData):
    """One task: the number that the sum has to hold, or the sum."""

    number: int
    sum: str | None = None


class ProposerSolverTask(vf.Task[ProposerSolverData, vf.State]):
    """Propose, or solve. Rewards are set at the end of the episode."""


class ProposerSolverTaskset(vf.Taskset[ProposerSolverTask, ProposerSolverConfig]):
    """Random numbers."""

    def load(self) -> Iterator[ProposerSolverTask]:
        generator, config = random.Random(self.config.seed), self.config
        for i in range(config.num_tasks):
            number = generator.randint(1, config.largest)
            given = random_sum(generator, config.largest, number) if config.given else None
            prompt = config.propose.replace("{number}", str(number))
            data = ProposerSolverData(id=str(i), prompt=prompt, number=number, sum=given)
            yield ProposerSolverTask(data, config.task)


class ProposerSolverHarness(ChatHarness):
    """One reply."""


class ProposerSolverEnvConfig(vf.EnvConfig):
    """Both seats, and how often the solver tries."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    attempts: int = Field(4, ge=1)


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    """The proposer gains most from a sum that the solver does half of the time; one that is none gains nothing."""

    async def run(self, task: ProposerSolverTask, agents: vf.Agents) -> None:
        if task.data.sum is not None:
            await self._solve(task, task.data.sum, agents.solver)
            return
        proposal = await agents.proposer.run(task)
        text = proposal.last_reply.strip()
        if value_of(text) is None or str(task.data.number) not in text:
            proposal.record_reward("difficulty", 0.0)
            return
        share = await self._solve(task, text, agents.solver)
        proposal.record_reward("difficulty", 1 - abs(2 * share - 1))

    async def _solve(self, task: ProposerSolverTask, text: str, solver: vf.Agent) -> float:
        """The share of the solver's attempts at a sum that are right."""
        question = task.with_data(prompt=self.taskset.config.solve.replace("{sum}", text))
        traces = await asyncio.gather(*(solver.run(question) for _ in range(self.config.attempts)))
        right = [float(trace.last_reply.strip() == str(value_of(text))) for trace in traces]
        for trace, reward in zip(traces, right, strict=True):
            trace.record_reward("right", reward)
        return fmean(right)

"""The verifiers taskset and environment of `proposer_solver`."""

import random
from collections.abc import Iterator
from statistics import fmean

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.proposer_solver.sums import value_of


class ProposerSolverConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the numbers that a sum has to hold."""
    largest: int = Field(99, ge=1)
    """Largest of them."""
    propose: str = "Write a sum with + - * and whole numbers that holds {number}. Reply with the sum alone."
    """What the proposer is told; `{number}` stands for the number."""
    solve: str = "{sum} = ? Reply with the number alone."
    """What the solver is told; `{sum}` stands for the sum."""


class ProposerSolverData(vf.TaskData):
    """One task: the number that the sum has to hold."""

    number: int


class ProposerSolverTask(vf.Task[ProposerSolverData, vf.State]):
    """Propose, or solve. Rewards are set at the end of the episode."""


class ProposerSolverTaskset(vf.Taskset[ProposerSolverTask, ProposerSolverConfig]):
    """Random numbers."""

    def load(self) -> Iterator[ProposerSolverTask]:
        generator, config = random.Random(self.config.seed), self.config
        for i in range(config.num_tasks):
            number = generator.randint(1, config.largest)
            prompt = config.propose.replace("{number}", str(number))
            yield ProposerSolverTask(ProposerSolverData(id=str(i), prompt=prompt, number=number), config.task)


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
        proposal = await agents.proposer.run(task)
        text = proposal.last_reply
        value = value_of(text)
        if value is None or str(task.data.number) not in text:
            proposal.record_reward("difficulty", 0.0)
            return
        question = task.with_data(prompt=self.taskset.config.solve.replace("{sum}", text.strip()))
        traces = [await agents.solver.run(question) for _ in range(self.config.attempts)]
        right = [float(trace.last_reply.strip() == str(value)) for trace in traces]
        for trace, reward in zip(traces, right, strict=True):
            trace.record_reward("right", reward)
        proposal.record_reward("difficulty", 1 - abs(2 * fmean(right) - 1))

"""A verifiers environment of two turns with a pause between them, for evaluations that last."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

from prime_hpc.envs.chat import ChatHarness

__all__ = ["SlowEnv", "SlowHarness", "SlowTaskset"]


class SlowTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def outcome(self, task: vf.TaskData, trace: vf.Trace) -> float:
        return trace.num_turns / 2


class SlowTaskset(vf.Taskset[SlowTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SlowTask]:
        for text in ("abc", "bca"):
            yield SlowTask(vf.TaskData(prompt=text), self.config.task)


class SlowHarness(ChatHarness):
    pass


class SlowEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    pause_s: float = 0.0
    until: str | None = None
    """A path that has to be there before the second turn."""


class SlowEnv(vf.Env[SlowEnvConfig]):
    async def run(self, task: SlowTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await asyncio.sleep(self.config.pause_s)
            while self.config.until and not Path(self.config.until).exists():
                await asyncio.sleep(0.05)
            await talk.turn("cab")

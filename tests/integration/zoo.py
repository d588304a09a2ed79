"""A verifiers environment whose tasks misbehave, each in its own way; for the tests of the environment worker."""

import asyncio
import time
from collections.abc import Iterator

import verifiers.v1 as vf

from prime_hpc.envs.chat import ChatHarness

__all__ = ["ZooEnv", "ZooHarness", "ZooTaskset"]

MODES = ("turns", "raise", "nan", "hang", "block", "fail", "unstamped", "stuck", "flood")


class ZooData(vf.TaskData):
    mode: str


class ZooTask(vf.Task[ZooData, vf.State]):
    @property
    def key(self) -> str:
        return self.data.mode

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.mode == "hang":
            await asyncio.sleep(3600)
        if self.data.mode == "block":
            time.sleep(3600)

    @vf.reward
    async def outcome(self, task: ZooData, trace: vf.Trace) -> float:
        if task.mode == "stuck":
            await asyncio.Event().wait()
        if task.mode == "raise":
            raise RuntimeError("the grader has a bug")
        return float("nan") if task.mode == "nan" else float(trace.num_turns)


class ZooTaskset(vf.Taskset[ZooTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ZooTask]:
        for mode in MODES:
            yield ZooTask(ZooData(prompt=mode, mode=mode), self.config.task)


class ZooHarness(ChatHarness):
    pass


class ZooEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class ZooEnv(vf.Env[ZooEnvConfig]):
    async def run(self, task: ZooTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            for text in ("again", "more") if task.data.mode == "turns" else ():
                await talk.turn(text)
            while task.data.mode == "flood" and not (await talk.turn("more")).terminated:
                pass

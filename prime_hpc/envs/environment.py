"""A source's verifiers environment: loaded once, its tasks by number, one episode at a time."""

import importlib
import os
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients.train import ElasticRendererPool
from verifiers.v1.utils.loaders import env_config_type, taskset_config_type

from prime_hpc.config.env import TaskSource
from prime_hpc.config.renderer import renderer_fields
from prime_hpc.config.sections import ModelConfig
from prime_hpc.envs.light import without_torch
from prime_hpc.envs.refusals import explain
from prime_hpc.envs.sandbox import verifiers_runtime
from prime_hpc.errors import EnvironmentFailure, InfrastructureFailure
from prime_hpc.transport.messages import RunRollout

KEY_VARIABLE = "PRIME_HPC_API_KEY"
"""Holds the run's token inside the worker. verifiers withholds variables named so from the programs of agents."""
PLUGIN_GROUPS = ("verifiers.v1.tasksets", "verifiers.v1.harnesses", "verifiers.v1.envs")


class Tasks:
    """Tasks by number. A bounded taskset is read whole, an endless one as far as it was asked for."""

    def __init__(self, taskset: vf.Taskset, limit: int | None):
        view = taskset.take(limit) if limit else taskset
        self._stream = iter(view)
        self._read: list[vf.Task] = list(self._stream) if view.bounded else []
        self.count = len(self._read) if view.bounded else None
        """Number of tasks; None where they never end."""

    def __getitem__(self, index: int) -> vf.Task:
        while len(self._read) <= index:
            task = next(self._stream, None)
            if task is None:
                raise InfrastructureFailure(f"task {index} was asked for, the taskset has {len(self._read)}")
            self._read.append(task)
        return self._read[index]


class Environment:
    """What a worker needs of verifiers."""

    def __init__(self, name: str, source: TaskSource, model: ModelConfig, scoring_timeout_s: float | None = None):
        """Load the environment of the source `name`.

        Raises:
            EnvironmentFailure: its module is missing, refuses its arguments, raises, or has no task.
        """
        self._model = model
        try:
            self._env = vf.load_environment(environment_config(source, scoring_timeout_s))
            self.tasks = Tasks(self._env.taskset, source.num_tasks)
        except ValidationError as error:
            cause = explain(error, taskset_config_type(plugin_id(source.id)).model_fields)
            raise EnvironmentFailure(f"source {name!r}: environment {source.id!r} does not load: {cause}") from None
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(f"source {name!r}: environment {source.id!r} does not load: {cause}") from error
        if self.tasks.count == 0:
            raise EnvironmentFailure(f"source {name!r}: environment {source.id!r} has no task; check its args")

    async def load_renderer(self) -> None:
        """Load what turns messages into tokens where all episodes find it: the seconds it takes are none of theirs.

        Raises:
            EnvironmentFailure: the model has no such renderer.
        """
        tokenizer = self._model.tokenizer or self._model.path
        try:
            client = self._client("", KEY_VARIABLE)
            with without_torch():
                await ElasticRendererPool(tokenizer, client.renderer, multiplex=client.multiplex).grow()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(f"renderer {self._model.renderer!r} does not load for {tokenizer}: {cause}; "
                                     "set model.renderer, its options or model.tokenizer") from error  # fmt: skip

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Keeps up what episodes share (tool servers, the endpoint of the agents)."""
        return self._env.serving()

    async def run(self, request: RunRollout) -> vf.Episode:
        """Run one episode. What fails inside is recorded in it."""
        task = self.tasks[request.task_index]
        return await self._env.run_slot(self._env.slots(task)[0], self._context(request))

    def _context(self, request: RunRollout) -> vf.ModelContext:
        client = self._client(request.base_url, request.key_variable or KEY_VARIABLE)
        given = {name: value for name, value in request.sampling.items() if value is not None}
        sampling = vf.SamplingConfig(**given, cache_salt=str(request.version))
        return vf.ModelContext(model=request.model, client=client, sampling=sampling)

    def _client(self, base_url: str, key_variable: str) -> vf.TrainClientConfig:
        return vf.TrainClientConfig(base_url=f"{base_url}/v1", api_key_var=key_variable,
                                    renderer=renderer_fields(self._model),
                                    renderer_model_name=self._model.tokenizer or self._model.path)  # fmt: skip


def offer_token(token: str) -> None:
    """Let the clients of this process show the run's token to the engines."""
    os.environ[KEY_VARIABLE] = token


def environment_config(source: TaskSource, scoring_timeout_s: float | None = None) -> vf.EnvConfig:
    """The verifiers configuration of a source. Seats that name no runtime have the source's, not a remote sandbox;
    those that name no limit of scoring get this one."""
    defaults = {"runtime": verifiers_runtime(source.runtime)}
    if scoring_timeout_s:
        defaults["timeout"] = {"scoring": scoring_timeout_s}
    data: dict[str, Any] = {**source.env_args, "taskset": {**source.args, "id": plugin_id(source.id)}}
    data["id"] = plugin_id(data.get("id", ""))
    declared = env_config_type(data["taskset"]["id"], data["id"]).model_fields
    for name, field in declared.items():
        if isinstance(field.default, vf.AgentConfig):
            data[name] = _seat(field.default, data.get(name, {}), defaults)
    return vf.resolve_env_config(data)


def plugin_id(module: str) -> str:
    """An id that verifiers resolves to `module`.

    verifiers looks for an id below its own packages first. That search fails for a dotted name, and imports all that
    lies beside. A dotted module is therefore imported here and made known where verifiers looks first.
    """
    if "." not in module or "/" in module or "@" in module:
        return module
    alias = module.replace(".", "_").lower()
    for group in PLUGIN_GROUPS:
        sys.modules[f"{group}.{alias}"] = importlib.import_module(module)
    return alias


def _seat(declared: vf.AgentConfig, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    seat = dict(given)
    if "timeout" in defaults and declared.timeout.scoring is None:
        seat["timeout"] = {**defaults["timeout"], **seat.get("timeout", {})}
    if isinstance(declared.runtime, vf.PrimeConfig):
        seat.setdefault("runtime", defaults["runtime"])
    if harness := seat.get("harness"):
        seat["harness"] = {**harness, "id": plugin_id(harness.get("id", ""))}
    return seat

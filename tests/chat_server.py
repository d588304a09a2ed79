"""A model for the tests of environments: an OpenAI chat endpoint whose replies a function gives."""

import socket
from collections.abc import Callable
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.envs.environment import Environment

Reply = Callable[[list[dict[str, Any]]], str | dict[str, Any]]
"""From the messages so far to a text, or to an assistant message."""


async def play(source: SourceConfig, reply: Reply, index: int = 0) -> vf.Episode:
    """One episode of task number `index` of an environment."""
    environment = Environment(source.id, source, ModelConfig(), scoring_timeout_s=60)

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        said = reply(body["messages"])
        message = {"role": "assistant", "content": said} if isinstance(said, str) else {"role": "assistant", **said}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return web.json_response({
            "id": "1", "object": "chat.completion", "created": 0, "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        })  # fmt: skip

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    try:
        async with environment.serving():
            task = environment.tasks[index]
            return await environment._env.run_slot(environment._env.slots(task)[0], context)
    finally:
        await runner.cleanup()

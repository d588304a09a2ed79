"""Tools that are functions in the worker: an agent calls them without a server or a program of its own."""

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter, ValidationError

from prime_hpc.envs.chat import ChatHarness, ask, ended


@dataclass(frozen=True)
class FunctionTool:
    """A function as a model sees it: name, docstring and typed parameters."""

    function: Callable[..., str | Awaitable[str]]

    @property
    def name(self) -> str:
        return self.function.__name__

    def schema(self) -> dict[str, Any]:
        """The tool of an OpenAI chat request."""
        hints = {name: p.annotation for name, p in inspect.signature(self.function).parameters.items()}
        parameters = {
            "type": "object",
            "properties": {name: TypeAdapter(hint).json_schema() for name, hint in hints.items()},
            "required": list(hints),
        }
        described = {"name": self.name, "description": inspect.getdoc(self.function), "parameters": parameters}
        return {"type": "function", "function": described}

    async def call(self, arguments: str) -> str:
        """What the function says, or what is wrong with the model's arguments: that is for the model to mend."""
        hints = {name: p.annotation for name, p in inspect.signature(self.function).parameters.items()}
        try:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict) or set(given) != set(hints):
                return f"error: {self.name} takes {', '.join(hints)}"
            typed = {name: TypeAdapter(hint).validate_python(given[name]) for name, hint in hints.items()}
        except (json.JSONDecodeError, ValidationError) as error:
            return f"error: {error}"
        said = self.function(**typed)
        return said if isinstance(said, str) else await said


class ToolHarness(ChatHarness):
    """A chat loop that goes on for as long as the policy calls tools; an agent's `max_turns` ends it.

    A subclass gives the tools of a task in `tools`, functions or coroutine functions; `runtime` is where the episode's
    programs run. The renderer must know the model's way of calling them.
    """

    def tools(self, data: vf.TaskData, runtime: vf.Runtime) -> Sequence[Callable[..., str | Awaitable[str]]]:
        raise NotImplementedError

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask, call what the reply calls, and ask again.

        Raises:
            InterceptionError: the endpoint is gone.
        """
        tools = {tool.name: tool for tool in map(FunctionTool, self.tools(data, runtime))}
        body = {"model": ctx.model, "messages": self._messages(data), "tools": [t.schema() for t in tools.values()]}
        while True:
            status, text = await ask(endpoint, secret, body)
            reply = json.loads(text)["choices"][0]["message"] if status == 200 else {}
            if not reply.get("tool_calls"):
                return ended(status, text, trace)
            body["messages"] += [reply, *[await _answer(tools, call) for call in reply["tool_calls"]]]


async def _answer(tools: dict[str, FunctionTool], call: dict[str, Any]) -> dict[str, str]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    content = await tools[name].call(arguments) if name in tools else f"error: there is no tool {name!r}"
    return {"role": "tool", "tool_call_id": call["id"], "content": content}

"""A chat loop inside the worker: no program, no container, so an episode costs milliseconds beside its model calls."""

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from prime_hpc.envs.failures import CONTEXT_FULL


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the conversation to the rollout's endpoint once a turn; the environment plays the user. Has no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime: vf.Runtime) -> None:
        """A container rewrites addresses for programs inside of it; this one runs in the worker."""
        await super().setup(runtime)
        runtime.host_url = _as_it_is  # type: ignore[method-assign]

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
        """Ask for one reply. A conversation that has outgrown the context ends here, to be scored as it stands.

        Raises:
            ValueError: the task has tools.
            InterceptionError: the endpoint is gone.
        """
        if mcp_urls:
            raise ValueError(f"the task has the tools {sorted(mcp_urls)}: choose a harness with tools, e.g. `null`")
        status, text = await ask(endpoint, secret, {"model": ctx.model, "messages": self._messages(data)})
        return ended(status, text, trace)

    def _messages(self, data: vf.TaskData) -> list[dict]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(m) for m in prompt or [])]


def _as_it_is(url: str) -> str:
    return url


async def ask(endpoint: str, secret: str, body: dict) -> tuple[int, str]:
    """Status and text of the rollout endpoint's answer to a chat request.

    Raises:
        InterceptionError: the endpoint is gone.
    """
    try:
        async with _session(secret) as http, http.post(f"{endpoint}/chat/completions", json=body) as reply:
            return reply.status, await reply.text()
    except aiohttp.ClientError as error:
        raise vf.InterceptionError(f"{endpoint}: {type(error).__name__}: {error}") from error


def ended(status: int, text: str, trace: vf.Trace) -> vf.ProgramResult:
    """How a program ends whose last request was answered so; a full context is no failure after the first reply."""
    well = status == 200 or (status == CONTEXT_FULL and trace.num_turns > 0)
    return vf.ProgramResult(exit_code=0 if well else 1, stdout="", stderr="" if well else text)


def _session(secret: str) -> aiohttp.ClientSession:
    """Its one connection is closed after use: a pooled one may be dropped by the server just as it is used again."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {secret}"},
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(force_close=True),
    )

"""Talk to a model that a run serves, or that a server does whose token is in a file.

    python -m prime_hpc.chat RUN [--system TEXT] [--max-tokens N] [--temperature T]
    python -m prime_hpc.chat http://HOST:PORT --token-file FILE

One line is one message. `/new` begins another conversation; Ctrl-D ends.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from prime_hpc.cluster import secrets
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.commands import cli
from prime_hpc.errors import InferenceFailure, InfrastructureFailure
from prime_hpc.plan.run_plan import load

Messages = list[dict[str, str]]


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="RUN", help="a run's directory, or the root of a server")
    parser.add_argument("--token-file", type=Path, help="the server's token; that of a run is found")
    parser.add_argument("--model", help="by default the first that is served")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, help="longest reply")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    return cli.run(lambda: talk(parser.parse_args(arguments)))


def talk(args: argparse.Namespace) -> int:
    """Converse until the end of the input."""
    base_url, token_file = (args.target, args.token_file) if "://" in args.target else find(Path(args.target))
    headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"} if token_file else {}
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    with httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(None, connect=10)) as http:
        body = {name: value for name, value in sampling.items() if value is not None}
        body["model"] = args.model or ask_model(http)
        print(f"{body['model']} at {base_url}")
        messages, session = list(beginning), uuid.uuid4().hex
        while line := _read_line():
            if line == "/new":
                messages, session = list(beginning), uuid.uuid4().hex
                continue
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": show(stream(http, body, messages, session))})
    return 0


def find(run_dir: Path) -> tuple[str, Path]:
    """The address of a run's router, or of its first engine, and the file with its token.

    Raises:
        InfrastructureFailure: nothing of it answers requests.
    """
    paths = RunPaths(run_dir.absolute())
    if not paths.plan.exists():
        raise InfrastructureFailure(f"{run_dir} is no run; start one with python -m prime_hpc.launch +experiment=serve")
    plan = load(paths.plan)
    rendezvous = Rendezvous(paths.rendezvous, "chat", plan.attempt)
    for process in [*plan.of("router"), *plan.engines()]:
        record = rendezvous.read(process.name)
        if record and record.get("base_url"):
            return record["base_url"], secrets.token_file(paths.root)
    raise InfrastructureFailure(f"no engine of {run_dir} is ready: python -m prime_hpc.status {run_dir}")


def ask_model(http: httpx.Client) -> str:
    """The first model that is served."""
    return _checked(http.get("/v1/models")).json()["data"][0]["id"]


def stream(http: httpx.Client, body: dict[str, Any], messages: Messages, session: str) -> Iterator[str]:
    """The reply, as it comes."""
    request = {**body, "messages": messages, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=request, headers={"X-Session-ID": session}) as reply:
        for line in _checked(reply).iter_lines():
            data = line.removeprefix("data: ")
            if data != line and data != "[DONE]":
                yield from (choice["delta"].get("content") or "" for choice in json.loads(data)["choices"])


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; returns the whole."""
    whole = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        whole += piece
    print()
    return whole


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _checked(reply: httpx.Response) -> httpx.Response:
    """Raises:
    InferenceFailure: the server did not answer with 200.
    """
    if reply.status_code != httpx.codes.OK:
        reply.read()
        raise InferenceFailure(f"{reply.url} answered {reply.status_code}: {reply.text[:500]}")
    return reply


if __name__ == "__main__":
    sys.exit(main())

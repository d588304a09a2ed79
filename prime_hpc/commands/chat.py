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

from prime_hpc.commands import cli
from prime_hpc.commands.endpoint import find
from prime_hpc.errors import InferenceFailure

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
    base_url, token_file = args.target, args.token_file
    if "://" not in base_url:
        endpoint = find(Path(args.target).absolute())
        base_url, token_file = next(iter(endpoint.urls.values())), endpoint.token_file
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
        raise InferenceFailure(f"{reply.url} answered {reply.status_code}: {_reason(reply.text)}")
    return reply


def _reason(body: str) -> str:
    """What is wrong, out of the JSON of an engine or a router, or of what else a server answered."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body[:500]
    return said["message"] if isinstance(said, dict) else said


if __name__ == "__main__":
    sys.exit(main())

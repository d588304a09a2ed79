"""Which recorded rollouts are worth learning from, as rows for SFT."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass
class Selection:
    """Takes rollouts that ended by themselves with at least `min_reward`, and of each task the `best`; of equal
    conversations the first, and of equal rewards the earlier."""

    min_reward: float | None = None
    best: int | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that were not taken, by reason."""

    def rows(self, records: Iterable[Record]) -> list[Record]:
        """A row for each rollout that is taken, in the order of the records."""
        tasks: dict[tuple[str, str], list[Record]] = defaultdict(list)
        seen: set[bytes] = set()
        for number, record in enumerate(records):
            row, reason = to_row(record), self._fault(record)
            digest = hashlib.blake2b(json.dumps([row["messages"], row.get("tools")]).encode()).digest()
            reason = reason or ("said before" if digest in seen else None)
            if reason:
                self.left_out[reason] += 1
                continue
            seen.add(digest)
            tasks[row["source"], row["task_id"]].append({**row, "number": number})
            self._keep_best(tasks[row["source"], row["task_id"]])
        taken = sorted((row for rows in tasks.values() for row in rows), key=lambda row: row["number"])
        return [{name: value for name, value in row.items() if name != "number"} for row in taken]

    def _keep_best(self, rows: list[Record]) -> None:
        """Drop the worst of a task's rows where there is one too many."""
        if self.best is not None and len(rows) > self.best:
            rows.remove(min(reversed(rows), key=lambda row: row["reward"]))
            self.left_out[f"not among the best {self.best} of its task"] += 1

    def _fault(self, record: Record) -> str | None:
        """Why a rollout is not taken, whatever the others are."""
        if record["failure"] is not None:
            return "failed"
        if record["truncated"]:
            return "truncated"
        if any(part.get("type") != "text" for part in _parts(record["messages"])):
            return "with images"
        if not any(message["role"] == "assistant" for message in record["messages"]):
            return "without a reply"
        low = self.min_reward is not None and _reward(record) < self.min_reward
        return f"reward below {self.min_reward:g}" if low else None


def to_row(record: Record) -> Record:
    """The conversation of a record as `trainer.sft.data` takes it, and where it comes from."""
    row = {"messages": [_message(message) for message in record["messages"]]}
    if record.get("tools"):
        row["tools"] = record["tools"]
    return {**row, "reward": _reward(record), **{name: record[name] for name in (
        "source", "task_id", "step", "rollout_id")}}  # fmt: skip


def _reward(record: Record) -> float | None:
    """Of the seat whose conversation is recorded: the first that the policy played."""
    return record["seats"][0]["reward"] if record.get("seats") else record["reward"]


def _message(message: Record) -> Record:
    """A message as chat requests have it."""
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "provider_state")}
    if not message.get("tool_calls"):
        return kept
    return {**kept, "tool_calls": [{"id": call["id"], "type": "function", "function": {
        "name": call["name"], "arguments": call["arguments"]}} for call in message["tool_calls"]]}  # fmt: skip


def _parts(messages: list[Record]) -> Iterator[Record]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from message["content"]

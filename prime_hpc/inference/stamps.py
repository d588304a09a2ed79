"""Which policy version sampled which token, and how long that is remembered."""

from collections import deque

from prime_hpc.transport.stamps import Span, Stamp


class SpanTracker:
    """Builds the spans of one request while its tokens arrive."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens = 0

    def reach(self, tokens: int, version: str) -> None:
        """The first `tokens` are sampled; those of them that were not before, under `version`."""
        if tokens <= self.tokens:
            return
        begin = self.tokens
        if self.spans and self.spans[-1][0] == version:
            begin = self.spans.pop()[1]
        self.spans.append((version, begin, tokens))
        self.tokens = tokens


class StampLog:
    """Stamps of the newest `capacity` finished requests, by session and in order of completion."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._order: deque[str] = deque()
        self._sessions: dict[str, deque[Stamp]] = {}

    def add(self, session: str, stamp: Stamp) -> None:
        self._order.append(session)
        self._sessions.setdefault(session, deque()).append(stamp)
        if len(self._order) > self._capacity:
            self._forget_oldest()

    def of(self, session: str) -> list[Stamp]:
        """Stamps of a session; empty where nothing is known."""
        return list(self._sessions.get(session, ()))

    def _forget_oldest(self) -> None:
        session = self._order.popleft()
        stamps = self._sessions[session]
        stamps.popleft()
        if not stamps:
            del self._sessions[session]

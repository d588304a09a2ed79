"""Version stamps: which policy version sampled which token of an episode, as its engine recorded it."""

from collections import defaultdict, deque

import aiohttp
import msgspec
import numpy as np

from prime_hpc.errors import InferenceFailure
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion
from prime_hpc.transport.stamps import Stamp, StampReply, checksum

FETCH_TIMEOUT_S = 30.0


class StampClient:
    """Asks engines for the stamps of a session; an async context manager."""

    def __init__(self, token: str):
        self._token = token

    async def __aenter__(self) -> "StampClient":
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def fetch(self, base_url: str, session: str) -> list[Stamp]:
        """Stamps of all requests of `session`, in order of completion.

        Raises:
            InferenceFailure: the engine is gone, refuses, or answers with something else.
        """
        url = f"{base_url}/prime_hpc/stamps/{session}"
        try:
            async with self._http.get(url) as reply:
                reply.raise_for_status()
                return msgspec.json.decode(await reply.read(), type=StampReply).requests
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise InferenceFailure(f"no version stamps from {url}: {type(error).__name__}: {error}") from error


def token_versions(completions: list[np.ndarray], stamps: list[Stamp]) -> list[np.ndarray]:
    """Packed versions i8[n] for each of the sampled completions (i4[n], in order of sampling).

    A completion belongs to the first unused stamp of its length and checksum. Tokens without a stamp get `NOT_SAMPLED`.
    """
    unused: dict[tuple[int, int], deque[Stamp]] = defaultdict(deque)
    for stamp in stamps:
        unused[stamp.tokens, stamp.crc].append(stamp)
    streams = []
    for ids in completions:
        stream = np.full(len(ids), NOT_SAMPLED, dtype=np.int64)
        if matching := unused[len(ids), checksum(ids)]:
            for version, begin, end in matching.popleft().spans:
                stream[begin:end] = PolicyVersion.parse(version).pack()
        streams.append(stream)
    return streams

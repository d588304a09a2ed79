"""The claim on engines of another run, which whoever started this one gives back, however it has ended."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from prime_hpc.cluster import secrets
from prime_hpc.cluster.addresses import engine_addresses
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.run import RunConfig

ANSWER_S = 3.0


def give_back(config: RunConfig, paths: RunPaths) -> None:
    """End the claim of a run that has ended. Where an engine does not hear of it, it ends by itself."""
    attach = config.inference.attach
    if not attach.on:
        return
    urls = attach.urls if attach.run is None else _engines_of(Path(attach.run))
    headers = {"Authorization": f"Bearer {secrets.load(paths.root).token}"}
    body = {"holder": str(paths.root), "seconds": 0.0}

    def tell(url: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url.rstrip('/')}/prime_hpc/claim", json=body, headers=headers, timeout=ANSWER_S)

    with ThreadPoolExecutor() as pool:
        list(pool.map(tell, urls))


def _engines_of(fleet: Path) -> list[str]:
    """Addresses of the engines of a fleet, whose directory may have been removed meanwhile."""
    if not RunPaths(fleet).plan.exists():
        return []
    return [url for url in engine_addresses(fleet).values() if url]

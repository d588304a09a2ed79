"""What engines say of themselves at `/metrics`, by vLLM's names."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES, PREFIX_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
CACHE = "vllm:cache_config_info"
READ = (KV_USAGE, RUNNING, WAITING, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, CACHE)


@dataclass(frozen=True)
class Gauges:
    """One engine, its data-parallel ranks together: KV use of the fullest; requests that run and wait; requests
    preempted, and prompt tokens looked up and found in the prefix cache, since it started; tokens its caches hold."""

    kv_usage: float
    running: int
    waiting: int
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_tokens: int | None = None


async def read_gauges(http: httpx.AsyncClient, base_url: str, timeout_s: float) -> Gauges | None:
    """The gauges of the engine at `base_url`; None where it does not answer, or does not tell its KV use."""
    try:
        reply = await http.get(f"{base_url}/metrics", timeout=timeout_s)
    except httpx.HTTPError:
        return None
    return parse(reply.text) if reply.status_code == 200 else None


def parse(text: str) -> Gauges | None:
    """Gauges from Prometheus' text format; None where the engine does not tell its KV use."""
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(READ))  # a tenth of what vLLM tells
    samples = [sample for family in text_string_to_metric_families(wanted) for sample in family.samples]
    values = {name: [sample.value for sample in samples if sample.name == name] for name in READ}
    if not values[KV_USAGE]:
        return None
    sizes = [_tokens(sample.labels) for sample in samples if sample.name == CACHE]
    return Gauges(
        kv_usage=max(values[KV_USAGE]),
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        preemptions=int(sum(values[PREEMPTIONS])),
        prefix_queries=int(sum(values[PREFIX_QUERIES])),
        prefix_hits=int(sum(values[PREFIX_HITS])),
        kv_tokens=sum(filter(None, sizes)) or None,
    )


def _tokens(labels: dict[str, str]) -> int | None:
    """Tokens of a cache by the labels that describe it; None before vLLM has measured it."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None

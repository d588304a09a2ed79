"""What is read from an engine's metrics."""

from prime_hpc.orchestrator.gauges import Gauges, parse

TOLD = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
vllm:num_preemptions_total{engine="0",model_name="policy"} 5.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.79e+09
vllm:num_preemptions_total{engine="1",model_name="policy"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 60.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10",prefix="a \\"b\\", c"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="10"} 1.0
"""


def test_data_parallel_ranks_are_one_engine() -> None:
    assert parse(TOLD) == Gauges(kv_usage=0.75, running=7, waiting=1, preemptions=7, prefix_queries=100,
                                 prefix_hits=60, kv_tokens=320)  # fmt: skip


def test_an_engine_may_tell_nothing() -> None:
    assert parse("") is None
    assert parse('vllm:num_requests_running{engine="0"} 3.0\n') is None
    unmeasured = 'vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{num_gpu_blocks="None"} 1.0\n'
    assert parse(unmeasured) == Gauges(0.5, 0, 0)

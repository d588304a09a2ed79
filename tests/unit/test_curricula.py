"""Which task and which source come next, and that a restored curriculum goes on as if nothing had happened."""

from collections import Counter

import msgspec
import pytest

from prime_hpc.algorithms.curricula import Mixture, OrderedSampler, PoolSampler, Sampler, make_sampler
from prime_hpc.config.curriculum import DifficultyPools, Pool, Sequential, Shuffled
from prime_hpc.config.env import SourceConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.orchestrator.journal import BatchCut, GroupOpened, JournalState, Memory
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.transport.messages import PolicyVersion

V0 = PolicyVersion(0, 0)
POOLS = [Pool(name="easy", threshold=1.0, weight=0.0), Pool(name="hard", threshold=0.25, weight=0.0),
         Pool(name="normal", threshold=0.75, weight=1.0)]  # fmt: skip


def draws(sampler: Sampler, count: int) -> list[int]:
    return [sampler.draw() for _ in range(count)]


def copied(state: dict) -> dict:
    """A state as it comes back from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def test_sequential_goes_round() -> None:
    assert draws(OrderedSampler(3), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_shuffled_takes_every_task_once_an_epoch_in_a_new_order() -> None:
    sampler = OrderedSampler(20, seed=3)
    first, second = draws(sampler, 20), draws(sampler, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))


@pytest.mark.parametrize("config", [Sequential(), Shuffled()])
def test_an_endless_taskset_is_taken_in_order(config: Sequential | Shuffled) -> None:
    assert draws(make_sampler(config, None, 0), 4) == [0, 1, 2, 3]


def test_pools_need_a_taskset_that_ends() -> None:
    with pytest.raises(ConfigurationError, match="never ends"):
        make_sampler(DifficultyPools(), None, 0)


def test_only_pools_with_weight_are_drawn_from() -> None:
    sampler = PoolSampler(3, POOLS, seed=0)
    for task, reward in enumerate([0.1, 0.5, 0.9]):
        sampler.observe(task, reward)
    assert sampler.sizes() == {"unseen": 0, "hard": 1, "normal": 1, "easy": 1}
    assert set(draws(sampler, 50)) == {1}


def test_the_latest_reward_decides_and_a_high_one_is_in_the_last_pool() -> None:
    sampler = PoolSampler(2, POOLS, seed=0)
    sampler.observe(0, 0.5)
    sampler.observe(0, 7.0)
    assert sampler.sizes() == {"unseen": 1, "hard": 0, "normal": 0, "easy": 1}
    assert set(draws(sampler, 20)) == {1}


def test_tasks_are_drawn_by_the_weight_of_their_pool() -> None:
    pools = [Pool(name="low", threshold=0.5, weight=3.0), Pool(name="high", threshold=1.0, weight=0.5)]
    sampler = PoolSampler(6, pools, seed=1)
    for task, reward in enumerate([0.0, 0.0, 1.0, 1.0]):
        sampler.observe(task, reward)
    counts = Counter(draws(sampler, 9000))
    assert [counts[task] / 1000 for task in range(6)] == pytest.approx([3, 3, 0.5, 0.5, 1, 1], rel=0.1)


def test_without_any_weight_all_tasks_are_alike() -> None:
    sampler = PoolSampler(2, POOLS, seed=0)
    sampler.observe(0, 1.0)
    sampler.observe(1, 0.0)
    assert set(draws(sampler, 50)) == {0, 1}


@pytest.mark.parametrize("config", [Sequential(), Shuffled(), DifficultyPools()])
def test_a_restored_sampler_goes_on_alike(config: Sequential | Shuffled | DifficultyPools) -> None:
    straight, resumed = make_sampler(config, 50, 7), make_sampler(config, 50, 7)
    for _ in range(30):
        straight.observe(task := straight.draw(), task % 11 / 10)
    resumed.restore(copied(straight.state()))
    for sampler in (straight, resumed):
        sampler.observe(3, 0.9)
    assert draws(resumed, 120) == draws(straight, 120)


def test_sources_are_drawn_by_their_shares() -> None:
    mixture = Mixture({"a": {0: 3.0}, "b": {0: 1.0}})
    drawn = [mixture.draw(1) for _ in range(40)]
    assert Counter(drawn) == {"a": 30, "b": 10}
    assert all("b" in drawn[i : i + 4] for i in range(0, 40, 4)), "a small share does not wait for the end"


def test_shares_follow_their_schedule() -> None:
    mixture = Mixture({"a": {0: 1.0, 10: 0.0}, "b": {0: 0.0, 10: 1.0}})
    assert {mixture.draw(0) for _ in range(10)} == {"a"}
    assert Counter(mixture.draw(5) for _ in range(20)) == {"a": 10, "b": 10}
    assert {mixture.draw(30) for _ in range(10)} == {"b"}


def test_a_restored_mixture_goes_on_alike() -> None:
    shares = {"a": {0: 3.0}, "b": {0: 1.7}, "c": {0: 0.4}}
    straight, resumed = Mixture(shares), Mixture(shares)
    for _ in range(17):
        straight.draw(1)
    resumed.restore(copied(straight.state()))
    assert [resumed.draw(1) for _ in range(50)] == [straight.draw(1) for _ in range(50)]


def stream() -> TaskStream:
    sources = {"a": SourceConfig(id="a", ratio=2.0, order=DifficultyPools()), "b": SourceConfig(id="b", num_tasks=5)}
    return TaskStream(sources, {"a": 30, "b": 20}, seed=1)


def test_num_tasks_of_the_source_limits_the_taskset() -> None:
    tasks = stream()
    drawn = [tasks.draw(1) for _ in range(60)]
    assert {index for source, _, index in drawn if source == "b"} == set(range(5))
    assert Counter(source for source, _, _ in drawn) == {"a": 40, "b": 20}


def test_a_stream_goes_on_behind_the_last_record_of_the_journal() -> None:
    straight, journal = stream(), JournalState()
    for n in range(50):
        source, draw, index = straight.draw(journal.step + 1)
        journal.apply(GroupOpened(group_id=str(n), source=source, draw=draw, task_index=index, version=V0), n)
        if n < 31:
            straight.observe(source, index, [0.0, index % 3 / 2])
        if n % 10 == 0:
            memory = Memory(tasks=copied(straight.state()))
            journal.apply(BatchCut(step=n // 10 + 1, lineage=0, group_ids=[], sample_ids=[], memory=memory), n)
    straight.observe("a", 0, [])
    resumed = stream()
    resumed.restore(journal)
    assert [resumed.draw(9) for _ in range(60)] == [straight.draw(9) for _ in range(60)]


def test_a_stream_tells_how_many_tasks_each_pool_has() -> None:
    tasks = stream()
    tasks.observe("a", 0, [1.0])
    assert tasks.metrics() == {"pools/a/unseen": 29, "pools/a/hard": 0, "pools/a/normal": 0, "pools/a/easy": 1}

"""From groups to batches: credit, staleness, pruning, and what the shelf keeps."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.config.algorithm import GRPO, OPD, RAE, DifficultyFilter, Distillation, Filters
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import CorruptData
from prime_hpc.orchestrator.batches import Batch, BatchMaker, BatchShelf
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import BatchCut, GroupOpened, Memory, RecordedBatch, RecordedGroup
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import (
    BatchRequest,
    Failure,
    ImageSpan,
    PolicyVersion,
    Rollout,
    RolloutDone,
    Sample,
    Seat,
)


def rollout(name: str, reward: float | None, version: int = 0) -> RolloutDone:
    stamp = PolicyVersion(0, version).pack()
    sample = Sample(
        sample_id=f"{name}/0", source="words",
        token_ids=Array.of([5, 6, 7, 8], "i4"), mask=Array.of([0, 0, 1, 1], "bool"),
        logprobs=Array.of([0, 0, -1, -2], "f4"), versions=Array.of([-1, -1, stamp, stamp], "i8"),
    )  # fmt: skip
    failure = None if reward is not None else Failure(kind="environment", type="Timeout", message="too slow")
    made = Rollout(rollout_id=name, source="words", task_id="t", samples=[sample], reward=reward, failure=failure)
    return RolloutDone(worker="w", rollout=made)


def group(name: str, rewards: list[float | None], version: int = 0, source: str = "words") -> Group:
    made = Group(name, source, 0, PolicyVersion(0, version), len(rewards))
    made.done = [rollout(f"{name}-{i}", reward, version) for i, reward in enumerate(rewards)]
    return made


def make(groups: list[Group], step: int = 1, **settings: object) -> Batch:
    config = RunConfig(algorithm=settings.pop("algorithm", GRPO()))
    config.env.train = settings.pop("sources", [])
    for key, value in settings.items():
        setattr(config.orchestrator, key, value)
    return BatchMaker(config, Lineages([])).make(step, groups)


def test_advantages_compare_a_group_and_failures_have_no_say() -> None:
    batch = make([group("a", [1.0, 0.0, None, 0.5])])
    assert [s.sample_id for s in batch.samples] == ["a-0/0", "a-1/0"], "the mean itself carries no gradient"
    assert [s.advantages.numpy().tolist() for s in batch.samples] == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5]]
    assert batch.dropped == {"zero_advantage": 2}
    assert len(batch.rollouts) == 4 and len(batch.scored) == 3


def test_zero_advantage_tokens_stay_where_they_are_wanted() -> None:
    batch = make([group("a", [1.0, 1.0])], drop_zero_advantage=False)
    assert len(batch.samples) == 2 and all(not s.advantages.numpy().any() for s in batch.samples)


def test_tokens_past_the_bound_leave_and_are_counted() -> None:
    batch = make([group("a", [1.0, 0.0], version=0), group("b", [1.0, 0.0], version=2)], step=4, max_staleness=1)
    assert [s.sample_id for s in batch.samples] == ["b-0/0", "b-1/0"]
    assert batch.dropped["stale"] == 4
    assert batch.staleness.tolist() == [1, 1, 1, 1]


def test_an_all_equal_batch_has_nothing_to_train() -> None:
    assert make([group("a", [1.0, 1.0]), group("b", [None, None])]).samples == []


def test_sources_have_algorithms_of_their_own() -> None:
    made = [group("a", [1.0, 0.0], source="words"), group("b", [1.0, 0.0], source="games"), group("c", [3.0, 1.0])]
    batch = make(made, sources=[SourceConfig(id="words"), SourceConfig(id="games", algorithm=RAE(decay=0.5))])
    assert [(s.sample_id, float(s.advantages.numpy()[2])) for s in batch.samples] == [
        ("a-0/0", 0.5), ("a-1/0", -0.5), ("b-0/0", 1.0), ("b-1/0", -0.5), ("c-0/0", 1.0), ("c-1/0", -1.0),
    ]  # fmt: skip


def test_baselines_of_self_play_go_on_where_the_last_attempt_stopped() -> None:
    config = RunConfig(algorithm=RAE(decay=0.5))
    first = BatchMaker(config, Lineages([]))
    first.make(1, [group("a", [1.0])])
    resumed = BatchMaker(config, Lineages([]), first.state())
    for maker in (first, resumed):
        [sample] = maker.make(2, [group("b", [1.0])]).samples
        assert sample.advantages.numpy()[2] == 0.5
    assert first.state() == resumed.state() == {"words": {"": 0.75}}


def recorded(step: int, made: Group, sample_ids: list[str], before: dict[str, dict[str, float]]) -> RecordedBatch:
    opened = GroupOpened(group_id=made.group_id, source=made.source, draw=0, task_index=0, version=made.version)
    cut = BatchCut(step=step, lineage=0, group_ids=[made.group_id], sample_ids=sample_ids)
    groups = [RecordedGroup(opened=opened, done=made.done)]
    return RecordedBatch(cut=cut, groups=groups, offset=7, before=Memory(credit=before))


def test_a_batch_made_again_has_groups_of_its_sources_sizes() -> None:
    config = RunConfig()
    config.env.train = [SourceConfig(id="words"), SourceConfig(id="sums", group_size=2)]
    made = group("a", [1.0, 0.0], source="sums")
    again = BatchMaker(config, Lineages([])).make_again(recorded(1, made, ["a-0/0", "a-1/0"], {}))
    assert [(each.size, each.finished) for each in again.groups] == [(2, True)]


def test_batches_made_again_carry_the_same_advantages() -> None:
    config = RunConfig(algorithm=RAE(decay=0.5))
    config.orchestrator.group_size = 1
    first = BatchMaker(config, Lineages([]))
    groups = [group("a", [1.0]), group("b", [-1.0])]
    cuts = [(first.state(), first.make(step, [made])) for step, made in enumerate(groups, 1)]
    resumed = BatchMaker(config, Lineages([]), first.state())
    for made, (before, batch) in zip(groups, cuts, strict=True):
        ids = [s.sample_id for s in batch.samples]
        again = resumed.make_again(recorded(batch.step, made, ids, before))
        assert again.samples == batch.samples and again.journal_offset == 7
    assert resumed.state() == first.state()
    with pytest.raises(CorruptData, match="its samples differ"):
        resumed.make_again(recorded(1, groups[0], ["other"], {}))


def test_a_batch_without_samples_leaves_baselines_alone() -> None:
    maker = BatchMaker(RunConfig(algorithm=RAE(decay=0.5)), Lineages([]), {"words": {"": 1.0}})
    assert maker.make(1, [group("a", [1.0])]).samples == []
    assert maker.make(20, [group("b", [5.0])]).samples == []
    assert maker.state() == {"words": {"": 1.0}}


def test_agents_of_one_episode_are_credited_apart() -> None:
    made = group("a", [0.0])
    [done] = made.done
    done.rollout.samples *= 2
    done.rollout.seats = [
        Seat(agent="white", reward=1.0, num_samples=1),
        Seat(agent="black", reward=-1.0, num_samples=1),
    ]
    batch = make([made], algorithm=RAE())
    assert [float(s.advantages.numpy()[3]) for s in batch.samples] == [1.0, -1.0]


def test_filtered_rollouts_count_in_the_baseline_and_do_not_train() -> None:
    made = group("a", [1.0, 0.0, 0.5])
    made.done[0].rollout.truncated = True
    filters = Filters(truncated=True, difficulty=DifficultyFilter(max_reward=1.0))
    batch = make([made, group("b", [1.0, 1.0])], drop_zero_advantage=False, algorithm=GRPO(filters=filters))
    assert [(s.sample_id, float(s.advantages.numpy()[2])) for s in batch.samples] == [("a-1/0", -0.5), ("a-2/0", 0.0)]
    assert batch.dropped == {"truncated": 2, "difficulty": 4}


def ask(shelf: BatchShelf, step: int, *, checkpointed: int = 0, world: int = 1, written: bool = False):
    return shelf.answer(BatchRequest(rank=0, world=world, step=step, checkpointed=checkpointed, written=written))


def test_all_ranks_are_told_to_write_weights_before_any_gets_the_batch(tiny_model: Path) -> None:
    async def scenario() -> None:
        config = RunConfig()
        config.max_steps, config.model.path = 3, str(tiny_model)
        shelf = BatchShelf(config)
        waiting = asyncio.create_task(ask(shelf, 2))
        await asyncio.sleep(0)
        await shelf.ask_for_weights(PolicyVersion(0, 1))
        assert (await waiting).write_weights
        await shelf.put(make([group("a", [1.0, 0.0])], step=2))
        assert (await ask(shelf, 2)).write_weights, "a rank that asks late, too"
        assert (await ask(shelf, 2, written=True)).micro_batches
        await shelf.ask_for_weights(PolicyVersion(0, 1))
        await shelf.put(make([group("b", [1.0, 0.0])], step=3))
        await shelf.ask_for_weights(PolicyVersion(0, 2))
        assert (await ask(shelf, 3)).micro_batches, "not where a rank may have the batch already"
        await shelf.ask_for_weights(PolicyVersion(0, 3))
        assert (await ask(shelf, 4)).last, "nor after the last step"

    asyncio.run(scenario())


def test_a_batch_is_kept_until_a_checkpoint_covers_it(tiny_model: Path) -> None:
    async def scenario() -> None:
        config = RunConfig()
        config.max_steps, config.model.path = 3, str(tiny_model)
        shelf = BatchShelf(config)
        first, second = make([group("a", [1.0, 0.0])]), make([group("b", [1.0, 0.0])], step=2)
        await shelf.put(first)
        await shelf.put(second)
        one = await ask(shelf, 1)
        assert one.sample_ids == ["a-0/0", "a-1/0"]
        await ask(shelf, 2)
        assert await ask(shelf, 1) == one, "a trainer that went back gets the same batch again"
        halves = await ask(shelf, 1, world=2)
        assert sum(micro.mask.length for micro in halves.micro_batches) == 4, "or cut for another number of ranks"
        await ask(shelf, 2, checkpointed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(shelf, 1, checkpointed=1), 0.05)
        assert (await ask(shelf, 4)).last

    asyncio.run(scenario())


def test_a_rank_gets_each_image_of_its_rows_once(tiny_model: Path) -> None:
    made = group("a", [1.0, 0.0, 0.5, 0.5])
    for done, digest in zip(made.done, "xxyz", strict=True):
        done.rollout.images = {digest: digest.encode()}
        done.rollout.samples[0].images = [ImageSpan(0, 2, digest)]

    async def scenario() -> None:
        config = RunConfig()
        config.model.path = str(tiny_model)
        shelf = BatchShelf(config)
        await shelf.put(make([made]))
        answer = await ask(shelf, 1)
        assert answer.images == {"x": b"x"}, "samples without a gradient are not sent, nor what they show"
        assert sum(len(micro.images) for micro in answer.micro_batches) == 2
        made.done[1].rollout.images = made.done[0].rollout.images = {}
        with pytest.raises(CorruptData, match="lack 1 of the images"):
            await ask(shelf, 1)

    asyncio.run(scenario())


def test_staleness_is_judged_by_each_token() -> None:
    mixed = group("a", [1.0, 0.0])
    old, new = PolicyVersion(0, 0).pack(), PolicyVersion(0, 3).pack()
    for done in mixed.done:
        done.rollout.samples[0].versions = Array.of([-1, -1, old, new], "i8")
    batch = make([mixed], step=4, max_staleness=2)
    assert [s.mask.numpy().tolist() for s in batch.samples] == [[False, False, False, True]] * 2
    assert batch.dropped == {"stale": 2}
    assert np.array_equal(batch.staleness, [0, 0])


def test_a_sample_with_an_incomplete_stamp_does_not_train_at_all() -> None:
    made = group("a", [1.0, 0.0])
    made.done[0].rollout.samples[0].versions = Array.of([-1, -1, -1, PolicyVersion(0, 0).pack()], "i8")
    batch = make([made])
    assert [s.sample_id for s in batch.samples] == ["a-1/0"]
    assert batch.dropped == {"unstamped": 2}


def scored(made: Group, ref_logprobs: list[float]) -> Group:
    for done in made.done:
        done.rollout.samples[0].ref_logprobs = Array.of(ref_logprobs, "f4")
    return made


def test_teachers_take_the_place_of_advantages() -> None:
    made = [scored(group("a", [1.0, 1.0], source="on"), [0, -1, -2, -3]), group("b", [1.0, 1.0], source="hard")]
    sources = [SourceConfig(id="on", algorithm=OPD(teacher="t")),
               SourceConfig(id="hard", algorithm=Distillation(teacher="t"))]  # fmt: skip
    for done in made[1].done:
        done.rollout.samples[0].source = "hard"
        done.rollout.samples[0].versions = Array.of([-1, -1, -1, -1], "i8")
    batch = make(made, step=50, max_staleness=60, sources=sources)
    on, hard = batch.samples[0], batch.samples[2]
    assert (on.ref_kl_weights.numpy().tolist(), on.rl_weights.numpy().tolist()) == ([0, 0, 1, 1], [0] * 4)
    assert (hard.ce_weights.numpy().tolist(), hard.rl_weights.numpy().tolist()) == ([0, 0, 1, 1], [0] * 4)
    assert not batch.dropped, "a teacher's tokens have no age"
    with pytest.raises(ValueError, match="was not scored"):
        make([group("a", [1.0], source="on")], sources=sources)


def test_what_was_dropped_shows_how_long_it_was() -> None:
    long = group("a", [1.0, 0.0])
    for done in long.done:
        done.rollout.samples[0].mask = Array.of([0, 1, 1, 1], "bool")
        done.rollout.samples[0].versions = Array.of([-1, 0, 0, PolicyVersion(0, 3).pack()], "i8")
    batch = make([long, group("b", [1.0, 0.0], version=3)], step=4, max_staleness=2)
    assert batch.dropped == {"stale": 4} and batch.dropped.lengths == {"stale": [3, 3]}


def test_old_tokens_may_weigh_less() -> None:
    batch = make([group("a", [1.0, 0.0], version=1)], step=4, age_discount=0.5)
    assert [s.rl_weights.numpy().tolist() for s in batch.samples] == [[1, 1, 0.25, 0.25]] * 2


def test_groups_say_whether_they_have_something_to_learn_from() -> None:
    maker = BatchMaker(RunConfig(algorithm=GRPO(filters=Filters(truncated=True))), Lineages([]))
    equal, failed, good, cut = (
        group("a", [1.0, 1.0]),
        group("b", [None]),
        group("c", [1.0, 0.0]),
        group("d", [1.0, 0.0]),
    )
    for done in cut.done:
        done.rollout.truncated = True
    assert [maker.informative(made) for made in (equal, failed, good, cut)] == [False, False, True, False]
    maker._config.orchestrator.drop_zero_advantage = False
    assert [maker.informative(made) for made in (equal, failed, good, cut)] == [True, False, True, False]

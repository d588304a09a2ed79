"""Which task comes next: every task once an epoch, restorable by the number of draws, sources by their shares."""

from prime_hpc.config.env import SourceConfig
from prime_hpc.orchestrator.tasks import Mixture, TaskOrder

SOURCE = SourceConfig(id="words")


def indices(order: TaskOrder, count: int) -> list[int]:
    return [order.draw()[1] for _ in range(count)]


def test_every_task_comes_once_an_epoch_in_a_new_order() -> None:
    order = TaskOrder(SOURCE, 20, seed=3)
    first, second = indices(order, 20), indices(order, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))


def test_the_number_of_draws_restores_the_order() -> None:
    straight = indices(TaskOrder(SOURCE, 7, seed=1), 30)
    assert indices(TaskOrder(SOURCE, 7, seed=1, draws=12), 18) == straight[12:]


def test_num_tasks_of_the_source_limits_the_taskset() -> None:
    assert max(indices(TaskOrder(SourceConfig(id="words", num_tasks=5), 20, seed=0), 50)) == 4


def test_an_endless_taskset_is_taken_in_order() -> None:
    assert indices(TaskOrder(SOURCE, None, seed=0), 4) == [0, 1, 2, 3]


def test_sources_are_drawn_by_their_shares() -> None:
    orders = {name: TaskOrder(SOURCE, 100, seed=0) for name in ("a", "b")}
    mixture = Mixture({"a": 3.0, "b": 1.0}, orders)
    drawn = [mixture.draw()[0] for _ in range(40)]
    assert drawn.count("a") == 30 and drawn.count("b") == 10
    assert "b" in drawn[:4], "a small share does not wait for the end"

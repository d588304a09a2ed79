"""How many ways parallelism divides the trainer's ranks and a model. Importing this module needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.config.trainer import ParallelConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError

KEY = "trainer.parallel"


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the dimensions of the mesh. Their product, without any that overlaps others, is the number of ranks."""

    dp_replicate: int = 1
    """Whole copies of the sharded model."""
    dp_shard: int = 1
    """Ranks with other rows that share one copy."""

    @property
    def dp(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.dp


def choose_degrees(config: RunConfig, ranks: int) -> Degrees:
    """The degrees of a run over `ranks` trainer ranks.

    Raises:
        ConfigurationError: they do not divide the ranks or the model.
    """
    problems = list(_problems(config.trainer.parallel, ranks))
    if problems:
        raise ConfigurationError(problems)
    parallel = config.trainer.parallel
    return Degrees(dp_replicate=parallel.dp_replicate, dp_shard=ranks // parallel.dp_replicate)


def find_parallel_problems(config: RunConfig) -> list[ConfigProblem]:
    """Degrees that do not divide the ranks or the model, with those that do."""
    return [] if config.mode == "serve" else list(_problems(config.trainer.parallel, trainer_ranks(config)))


def _problems(parallel: ParallelConfig, ranks: int) -> Iterator[ConfigProblem]:
    yield from _refuse("dp_replicate", parallel.dp_replicate, _divisors(ranks), f"what divides {ranks} ranks")


def _refuse(name: str, value: int, legal: list[int], reason: str) -> Iterator[ConfigProblem]:
    if value not in legal:
        yield ConfigProblem(f"{KEY}.{name}", value, f"one of {', '.join(map(str, legal))}: {reason}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

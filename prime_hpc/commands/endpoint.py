"""Where the model that a run serves is called, by which name, and what opens it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.cluster import secrets
from prime_hpc.cluster.addresses import addresses
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.observe.resumption import how_to_resume
from prime_hpc.observe.run_facts import RunFacts, read_run
from prime_hpc.plan.run_plan import ProcessPlan


@dataclass(frozen=True)
class Endpoint:
    """Addresses by process, that of a router alone where there is one; `token_file` has what a request must show."""

    urls: dict[str, str]
    model: str
    token_file: Path

    def __str__(self) -> str:
        addresses = [f"{name:<12} {url}/v1" for name, url in self.urls.items()]
        return "\n".join([*addresses, f"{'model':<12} {self.model}", f"{'token':<12} {self.token_file}"])


def find(run_dir: Path) -> Endpoint:
    """Where a run serves its model.

    Raises:
        InfrastructureFailure: the run has ended, or none of its engines answers yet; the text has the state of each.
    """
    facts = read_run(run_dir)
    if facts.over or not facts.attempts:
        raise InfrastructureFailure(f"{run_dir} is not at work; {how_to_resume(facts.paths)}")
    engines, routers = (_answering(facts, processes) for processes in (facts.plan.engines(), facts.plan.of("router")))
    if not engines:
        raise InfrastructureFailure(f"no engine of {run_dir} is ready: {_states(facts)}")
    model = facts.plan.typed_config().model.served_name
    return Endpoint(routers or engines, model, secrets.token_file(facts.paths.root))


def _answering(facts: RunFacts, processes: Iterable[ProcessPlan]) -> dict[str, str]:
    return {name: url for name, url in addresses(facts.paths, facts.plan, processes).items() if url}


def _states(facts: RunFacts) -> str:
    states = {p.name: facts.records[p.name].state if p.name in facts.records else "not started"
              for p in facts.plan.engines()}  # fmt: skip
    return ", ".join(f"{name} is {state}" for name, state in states.items()) or "it has none of its own"

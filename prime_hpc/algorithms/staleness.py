"""How old a token is when its batch is cut, and which tokens are too old or of a lost lineage to train on."""

import msgspec
import numpy as np

from prime_hpc.plan.run_plan import Fork
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Sample


class Lineages:
    """The history of a run's weights: each fork goes back to a step and abandons what came after it."""

    def __init__(self, forks: list[Fork]):
        self._forks = sorted(forks, key=lambda fork: fork.lineage)

    @property
    def current(self) -> int:
        """The lineage that trains now; 0 before the first fork."""
        return self._forks[-1].lineage if self._forks else 0

    def until(self, lineage: int) -> "Lineages":
        """The history as it was when `lineage` trained."""
        return Lineages([fork for fork in self._forks if fork.lineage <= lineage])

    def replace(self, forks: list[Fork]) -> None:
        """Take over a newer history of the same run."""
        self._forks = sorted(forks, key=lambda fork: fork.lineage)

    def alive(self, version: PolicyVersion) -> bool:
        """Whether `version` is an ancestor of the weights that train now, or one of them."""
        later = [fork.step for fork in self._forks if fork.lineage > version.lineage]
        return version.lineage <= self.current and all(version.step <= step for step in later)


def restrict(sample: Sample, step: int, max_staleness: int, lineages: Lineages) -> tuple[Sample, dict[str, int]]:
    """`sample` without the tokens that must not train in batch `step`, and how many left the mask, by reason.

    unstamped: the version is unknown. lineage: the version was abandoned. stale: staleness above `max_staleness`.
    Only reasons that occurred are in the counts.
    """
    mask, versions = sample.mask.numpy(), sample.versions.numpy()
    leaving = np.zeros_like(mask)
    dropped: dict[str, int] = {}
    for packed in np.unique(versions[mask]):
        reason = _reason(int(packed), step, max_staleness, lineages)
        if reason:
            chosen = mask & (versions == packed)
            leaving |= chosen
            dropped[reason] = dropped.get(reason, 0) + int(chosen.sum())
    if not dropped:
        return sample, dropped
    return msgspec.structs.replace(sample, mask=Array.of(mask & ~leaving, "bool")), dropped


def _reason(packed: int, step: int, max_staleness: int, lineages: Lineages) -> str | None:
    if packed == NOT_SAMPLED:
        return "unstamped"
    version = PolicyVersion.unpack(packed)
    if not lineages.alive(version):
        return "lineage"
    return "stale" if (step - 1) - version.step > max_staleness else None


def token_staleness(sample: Sample, step: int) -> np.ndarray:
    """i8[k]: `(step - 1) - version.step` of each masked token of known version, in order."""
    versions = sample.versions.numpy()
    known = versions[sample.mask.numpy() & (versions != NOT_SAMPLED)]
    unique, inverse = np.unique(known, return_inverse=True)
    steps = np.array([PolicyVersion.unpack(packed).step for packed in unique], dtype=np.int64)
    return (step - 1) - steps[inverse]


def discounted(sample: Sample, step: int, factor: float) -> Sample:
    """`sample` with the policy-gradient weight of each masked token times `factor` to the power of its staleness."""
    mask, versions = sample.mask.numpy(), sample.versions.numpy()
    aged = mask & (versions != NOT_SAMPLED)
    weights = np.ones(len(mask), dtype=np.float32) if sample.rl_weights is None else sample.rl_weights.numpy().copy()
    weights[aged] *= factor ** token_staleness(sample, step)
    return msgspec.structs.replace(sample, rl_weights=Array.of(weights, "f4"))


def max_age(sample: Sample, step: int) -> int:
    """Staleness of the oldest masked token; 0 where there is none."""
    return int(token_staleness(sample, step).max(initial=0))


def single_version(sample: Sample) -> np.ndarray:
    """bool[n]: sampled tokens whose earlier sampled tokens all carry their own version, so that one set of weights
    scores them exactly. A token outside the mask still counts as context; one that lost its stamp matches nothing.
    """
    versions, logprobs = sample.versions.numpy(), sample.logprobs.numpy()
    stamped = versions != NOT_SAMPLED
    sampled = np.flatnonzero(stamped | sample.mask.numpy() | (logprobs != 0))
    single = np.zeros(len(versions), dtype=bool)
    same = versions[sampled] == versions[sampled[:1]]
    single[sampled] = np.logical_and.accumulate(same) & stamped[sampled]
    return single

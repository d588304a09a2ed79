"""What happens between a checked configuration and running processes: name, attempt, resume point, files."""

import datetime
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from prime_hpc.cluster.beats import FOLDER
from prime_hpc.cluster.files import list_fresh, write_atomic, write_json
from prime_hpc.cluster.gpus import count_gpus
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK, DRAIN_MARK
from prime_hpc.cluster.stopping import StoppingMarks
from prime_hpc.cluster.striping import spread
from prime_hpc.config.compose import Layer, annotated_yaml
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse, to_dict
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.launchers import origin
from prime_hpc.observe.resumption import find_ended_fleet
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import Fork, RunPlan, read_forks
from prime_hpc.transport.checkpoints import CheckpointManifest, find_latest, resolve, verify
from prime_hpc.transport.weights import published_versions

WORDS = ("amber birch cedar coral delta ember fjord flint grove haven heron indigo iris jade juniper kestrel lagoon "
         "larch lotus maple marlin mesa moss nova ochre onyx opal otter pearl pine quartz raven reed sierra slate "
         "tundra umber willow zephyr").split()  # fmt: skip
RESUMABLE = ("max_steps", "resume", "run", "launcher", "cluster", "recovery", "pause", "monitor", "guard", "checkpoint",
             "env.eval", "env.workers", "env.rollouts_per_worker", "env.error_budget", "inference", "update",
             "trainer.ranks", "trainer.threads", "trainer.parallel", "trainer.share_gpu", "trainer.env",
             "trainer.profile", "trainer.self_check", "trainer.linear_attn", "orchestrator.max_inflight",
             "orchestrator.progress_every_s")  # fmt: skip
"""Keys (and everything below them) that may change when a run is resumed."""


@dataclass(frozen=True)
class RunStart:
    """A run about to start: its configuration, its plan and the origin of every value."""

    config: RunConfig
    plan: RunPlan
    origins: list[Layer]

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.plan.run_dir))

    @classmethod
    def resolve(cls, config: RunConfig, *, experiment: str | None, origins: list[Layer]) -> "RunStart":
        """Name the run, find its attempt and resume point, and make its plan. Writes and deletes nothing.

        Raises:
            ConfigurationError: the name is taken, there is nothing to resume, a key that must not change did, the
                checkpoint to start from does not fit, or the fleet to attach to has ended.
        """
        name = config.run.name or _new_name(experiment or config.mode)
        run_dir = Path(config.run.output_dir).absolute() / name
        _check_writable(Path(config.run.output_dir))
        attempts = _attempts(RunPaths(run_dir))
        if attempts and not config.resume:
            raise ConfigurationError([_taken(name, RunPaths(run_dir))])
        _check_fleet(config)
        config = origin.settle(config, RunPaths(run_dir), attempts)
        attempt = Attempt(number=attempts + 1, forks=_first_forks(config))
        if config.resume and (attempts or config.resume != "auto"):
            attempt = _resume(config, RunPaths(run_dir), attempt)
        config = replace(config, run=replace(config.run, name=name))
        gpus = 0 if config.launcher.on_slurm else count_gpus()
        return cls(config, build_plan(config, run_dir, attempt, gpus), origins)

    def write_dry(self) -> None:
        """config.yaml and plan.json, and nothing else."""
        text = annotated_yaml(to_dict(self.config), self.origins)
        write_atomic(self.paths.config, text.encode())
        write_atomic(self.paths.plan, self.plan.dump())

    def write(self, *, config_too: bool = True) -> None:
        """The files of a new attempt; what an earlier attempt left for its own processes only is cleared away.

        A job that goes on by itself leaves `config.yaml`, which knows where each value came from, as it is.
        """
        paths = self.paths
        for directory in (paths.logs(self.plan.attempt), paths.rendezvous, paths.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
        for name in list_fresh(paths.rendezvous):
            if name.endswith(".json") or name in (COMPLETE_MARK, DRAIN_MARK):
                (paths.rendezvous / name).unlink()
        StoppingMarks(paths).clear()
        # weights too: the first version is published anew, and nobody may read an old one of that name meanwhile
        for directory in (paths.acks, paths.exits, paths.rendezvous / FOLDER, paths.control, paths.batches,
                          paths.weights):  # fmt: skip
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        for directory in (paths.checkpoints, paths.weights):
            spread(directory)
        if config_too:
            self.write_dry()
        else:
            write_atomic(paths.plan, self.plan.dump())
        write_json(paths.forks, msgspec.to_builtins(self.plan.forks))


def _taken(name: str, paths: RunPaths) -> ConfigProblem:
    some = find_latest(paths.checkpoints, read_forks(paths.forks)) is not None
    onward = "resume=latest goes on with it" if some else "resume=auto starts it again, as it has no checkpoint"
    return ConfigProblem("run.name", name, f"a new name, since this run exists; {onward}")


def _resume(config: RunConfig, paths: RunPaths, attempt: Attempt) -> Attempt:
    """Where the attempt goes on. Anything but the newest state takes the orchestrator's journal back with it."""
    forks = read_forks(paths.forks)
    if config.resume == "auto" and find_latest(paths.checkpoints, forks) is None:
        return replace(attempt, forks=_forks(paths, 0))
    newest = config.resume in ("latest", "auto")
    checkpoint = resolve(paths.checkpoints, "latest" if newest else config.resume, forks)
    manifest = verify(checkpoint)
    _refuse_changes(manifest, config)
    return replace(attempt, checkpoint=checkpoint, forks=_forks(paths, manifest.step), rewind=not newest)


def _first_forks(config: RunConfig) -> list[Fork]:
    """A run that begins from another one's weights is on lineage 1: engines start with v0.0, which is `model.path`."""
    return [Fork(lineage=1, step=0)] if config.start_from.path else []


def _forks(paths: RunPaths, step: int) -> list[Fork]:
    """The history of lineages: a run that published versions past `step` goes on from there under a new one."""
    forks = read_forks(paths.forks)
    current = forks[-1].lineage if forks else 0
    newest = max((v.step for v in published_versions(paths.weights) if v.lineage == current), default=0)
    if newest > step:
        forks.append(Fork(lineage=current + 1, step=step))
    return forks


def _refuse_changes(manifest: CheckpointManifest, config: RunConfig) -> None:
    """Keys that the version which wrote the checkpoint did not know yet had their defaults."""
    before, now = _flat(to_dict(parse(manifest.config))), _flat(to_dict(config))
    changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and not _may_change(k)]
    if changed:
        problems = [ConfigProblem(k, now.get(k), f"{before.get(k)!r} as in the checkpoint") for k in changed]
        raise ConfigurationError(problems, f"a resumed run may change only {', '.join(RESUMABLE)}; for anything else "
                                 "begin a new run from the checkpoint: start_from.path=RUN")  # fmt: skip


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE)


def _flat(section: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _attempts(paths: RunPaths) -> int:
    numbers = [int(n.removeprefix("attempt_")) for n in list_fresh(paths.root / "logs") if n.startswith("attempt_")]
    return max(numbers, default=0)


def _new_name(experiment: str) -> str:
    now = datetime.datetime.now()
    return f"{experiment}-{now:%m%d-%H%M%S}-{random.SystemRandom().choice(WORDS)}"


def _check_fleet(config: RunConfig) -> None:
    """Refuse a fleet that has ended before the run's name is used up; a dry run may come before its fleet."""
    fleet = config.inference.attach.run
    if fleet is not None and RunPaths(Path(fleet)).plan.exists() and (problem := find_ended_fleet(Path(fleet))):
        raise ConfigurationError([problem])


def _check_writable(output_dir: Path) -> None:
    existing = output_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError([ConfigProblem("run.output_dir", str(output_dir),
            f"a folder that this user may write to; {existing} is not")])  # fmt: skip

"""The trainer's checkpoints: written by a thread of every rank while training goes on, complete or absent.

A rank's thread writes its shards and their digests. Once all ranks are done, which they find out together at a step
boundary, rank 0 seals the directory with its manifest and renames it.
"""

import errno
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from prime_hpc.cluster.files import appears
from prime_hpc.cluster.role import Role
from prime_hpc.errors import ConfigProblem, ConfigurationError, CorruptData, InfrastructureFailure
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.transport import checkpoints
from prime_hpc.transport.checkpoints import CheckpointManifest
from prime_hpc.transport.messages import StepReport
from prime_hpc.transport.weights import FileEntry

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
LATE_S = 10.0
"""A checkpoint that the plan names is waited for so long."""


class _Outcome(msgspec.Struct):
    """What one rank's thread came to: its files, or why there are none."""

    files: dict[str, FileEntry] = {}
    error: str | None = None
    disk_full: bool = False


@dataclass(frozen=True)
class _Save:
    """A save under way."""

    step: int
    journal_offset: int
    partial: Path
    began: float
    outcome: "Future[_Outcome]"
    report: StepReport | None


class Checkpointer:
    """Saves and restores the parameters that train, optimisers and random generators. All ranks call every method
    alike."""

    def __init__(self, role: Role, world: World, policy: PolicyModel, optimizers: list[Optimizer], lineage: int):
        self._role, self._world, self._policy, self._optimizers = role, world, policy, optimizers
        self._options = StateDictOptions(ignore_frozen_params=bool(policy.lora), strict=not policy.lora)
        self._lineage = lineage
        self._directory = role.paths.checkpoints
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._save: _Save | None = None
        self.newest = 0
        """Step of the newest complete checkpoint of this run, 0 for none."""
        self.save_s: float | None = None
        """Seconds from the begin of the newest save until it was complete."""
        self.report: StepReport | None = None
        """Of the newest step, on rank 0."""

    def take_over(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Take the weights of another run and, on request, its optimiser states; learning rates and all else that the
        configuration sets stay as they are.

        Raises:
            ConfigurationError: it holds other parameters or states.
            CorruptData: a file is missing or damaged.
        """
        reader, _ = self._open(checkpoint)
        model, states = get_state_dict(self._policy, self._optimizers, options=self._options)
        wanted: dict[str, Any] = {"model": model}
        if optimizer:
            wanted["optimizer"] = {"state": states["state"]}
        _refuse_other_shapes(checkpoint, wanted, reader.read_metadata().state_dict_metadata)
        dcp.load(wanted, storage_reader=reader)
        set_state_dict(self._policy, self._optimizers if optimizer else [], model_state_dict=model,
                       optim_state_dict=states if optimizer else {}, options=self._options)  # fmt: skip

    def load(self, checkpoint: Path) -> int:
        """Restore everything from `checkpoint`, written by any number of ranks; returns its step.

        Raises:
            CorruptData: a file is missing or damaged, or the shapes are those of another model.
        """
        reader, manifest = self._open(checkpoint)
        stored = reader.read_metadata().state_dict_metadata
        state = self._state()
        if manifest.world != self._world.size:
            state.pop("rng")
        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            raise CorruptData(f"{checkpoint} does not fit this model: {error}") from error
        set_state_dict(self._policy, self._optimizers, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"], options=self._options)  # fmt: skip
        if "rng" in state:
            self._restore_rng(state["rng"], stored)
        self.newest = manifest.step
        if manifest.report and self._world.first:
            metrics = {name: math.nan if value is None else value for name, value in manifest.report.items()}
            self.report = StepReport(step=manifest.step, metrics=metrics)
        return manifest.step

    def _open(self, checkpoint: Path) -> tuple[FileSystemReader, CheckpointManifest]:
        """A reader of a checkpoint whose files one rank has compared with the manifest."""
        appears(checkpoint, LATE_S)
        manifest = checkpoints.verify(checkpoint) if self._world.first else checkpoints.read_manifest(checkpoint)
        dist.barrier()
        return FileSystemReader(checkpoint), manifest

    def costs(self) -> dict[str, float]:
        """`time/save`, once there was one."""
        return {} if self.save_s is None else {"time/save": self.save_s}

    def save_if_due(self, step: int, journal_offset: int) -> None:
        """At the end of `step`: settle a save that all ranks have finished, and begin one where one is due."""
        if self._save and self._all_done():
            self._settle(final=False)
        every = self._role.config.checkpoint.every
        if every and step % every == 0:
            self._wait(final=False)
            self._begin(step, journal_offset)

    def note(self, report: StepReport | None) -> None:
        """Take the report of the step that has just ended, whose checkpoint is to hold it."""
        self.report = report
        if self._save and report and self._save.step == report.step:
            self._save = replace(self._save, report=report)

    def finish(self, step: int, journal_offset: int) -> Path:
        """Wait until a complete checkpoint of the last `step` exists, and return it.

        Raises:
            InfrastructureFailure: it could not be written.
        """
        self._wait(final=bool(self._save and self._save.step == step))
        if self.newest != step:
            self._begin(step, journal_offset)
            self._wait(final=True)
        return self._role.paths.checkpoint(step)

    def _begin(self, step: int, journal_offset: int) -> None:
        self._role.reach("save.before")
        began, partial = time.monotonic(), checkpoints.partial_path(self._directory, step)
        if self._world.first:
            checkpoints.remove_partials(self._directory)
            partial.mkdir(parents=True)
        dist.barrier()
        saved = dcp.async_save(self._state(), storage_writer=_ShardWriter(partial),
                               process_group=self._world.background)  # fmt: skip
        outcome = self._thread.submit(_await_files, saved, partial, self._world.rank)
        report = self.report if self.report and self.report.step == step else None
        self._save = _Save(step, journal_offset, partial, began, outcome, report)

    def _all_done(self) -> bool:
        done = torch.tensor(int(self._save.outcome.done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        return bool(done)

    def _wait(self, *, final: bool) -> None:
        if self._save:
            self._settle(final=final)

    def _settle(self, *, final: bool) -> None:
        """Turn the finished parts of all ranks into a complete checkpoint, or remove them.

        Raises:
            InfrastructureFailure: a rank failed for another reason than a full disk, or the save was the last.
        """
        save, self._save = self._save, None
        outcomes = [msgspec.convert(o, _Outcome) for o in gather(save.outcome.result())]
        errors = [f"rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error]
        if errors:
            self._give_up(save, errors, survivable=all(o.disk_full for o in outcomes if o.error) and not final)
            return
        if self._world.first:
            self._publish(save, {name: entry for o in outcomes for name, entry in o.files.items()})
        dist.barrier()
        self.newest, self.save_s = save.step, time.monotonic() - save.began
        self._role.reach("save.after")

    def _publish(self, save: _Save, files: dict[str, FileEntry]) -> None:
        self._role.lease.check()
        self._role.reach("save.during")
        manifest = CheckpointManifest(step=save.step, lineage=self._lineage, world=self._world.size,
                                      journal_offset=save.journal_offset, files=files,
                                      config=self._role.plan.config,
                                      report=save.report.metrics if save.report else {})  # fmt: skip
        final = checkpoints.publish(save.partial, manifest)
        keep = self._role.config.checkpoint
        removed = checkpoints.prune(self._directory, keep.keep_last, keep.keep_every)
        self._role.log.info("checkpoint %s is complete%s", final.name, f", removed {removed}" if removed else "")

    def _give_up(self, save: _Save, errors: list[str], *, survivable: bool) -> None:
        if self._world.first:
            shutil.rmtree(save.partial, ignore_errors=True)
        kept = f"the newest complete checkpoint is step {self.newest}" if self.newest else "there is no checkpoint yet"
        text = f"checkpoint {save.step} could not be written to {self._directory} ({'; '.join(errors)}); {kept}"
        if not survivable:
            raise InfrastructureFailure(f"{text}. Free space or fix the file system, then resume")
        if self._world.first:
            self._role.log.error("%s. The run goes on; free space before the next save", text)

    def _state(self) -> dict[str, Any]:
        """Sharded parameters that train, optimiser states, and this rank's random generators under its own names."""
        model, optimizer = get_state_dict(self._policy, self._optimizers, options=self._options)
        rng = {f"cpu.{self._world.rank}": torch.get_rng_state()}
        if self._world.device.type == "cuda":
            rng[f"cuda.{self._world.rank}"] = torch.cuda.get_rng_state(self._world.device)
        return {"model": model, "optimizer": optimizer, "rng": rng}

    def _restore_rng(self, rng: dict[str, torch.Tensor], stored: dict[str, Any]) -> None:
        torch.set_rng_state(rng[f"cpu.{self._world.rank}"])
        if f"cuda.{self._world.rank}" in rng and f"rng.cuda.{self._world.rank}" in stored:
            torch.cuda.set_rng_state(rng[f"cuda.{self._world.rank}"], self._world.device)


def _refuse_other_shapes(checkpoint: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    """Compare the tensors that a run needs with those of a checkpoint, by name and shape."""
    needed = {name: list(value.shape) for name, value in _tensors(wanted, ()) if isinstance(value, torch.Tensor)}
    given = {name: list(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    given = {name: size for name, size in given.items() if name.startswith("model.") or name in needed}
    bad = [f"{name} {given.get(name, 'none')} there, {needed.get(name, 'none')} here"
           for name in sorted(needed | given) if needed.get(name) != given.get(name)]  # fmt: skip
    if bad:
        states = all(line.startswith("optimizer.") for line in bad)
        part = "the states of this optimiser, or start_from.optimizer=false" if states else "this very model"
        raise ConfigurationError([ConfigProblem("start_from.path", str(checkpoint),
            f"a checkpoint of {part}; {len(bad)} tensors differ: {'; '.join(bad[:2])}")])  # fmt: skip


def _tensors(state: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, named as in a checkpoint."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _tensors(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


class _ShardWriter(FileSystemWriter):
    """Lets the error of the file system through, which torch hides behind one about its archive format."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise (_find_os_error(error) or error) from error


def _find_os_error(error: BaseException | None) -> OSError | None:
    while error and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _await_files(saved: Future, partial: Path, rank: int) -> _Outcome:
    """Runs in the thread: wait for the shards of `rank`, then digest them."""
    try:
        saved.result()
        patterns = [f"__{rank}_*.distcp", *([".metadata"] if rank == 0 else [])]
        paths = [path for pattern in patterns for path in partial.glob(pattern)]
        return _Outcome({path.name: checkpoints.describe(path) for path in paths})
    except CheckpointException as error:  # handed to `_settle`, where all ranks decide together
        causes = [cause for cause, _ in error.failures.values()]
    except OSError as error:
        causes = [error]
    full = all(isinstance(cause, OSError) and cause.errno in DISK_FULL for cause in causes)
    return _Outcome(error=", ".join(map(repr, causes)), disk_full=full)

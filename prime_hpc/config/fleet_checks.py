"""Fleets that outlive runs: what a run that attaches to one cannot have, and what only a fleet alone has."""

from collections.abc import Iterator
from pathlib import Path

from prime_hpc.config.inference import AttachConfig
from prime_hpc.config.json_files import read_json
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem

KEY = "inference.attach"


def find_fleet_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Every conflict of `inference.attach` and `inference.router`."""
    if config.inference.router != "none" and config.mode != "serve":
        yield ConfigProblem("inference.router", config.inference.router,
                            "none, except with mode=serve: the orchestrator chooses engines itself")  # fmt: skip
    if not config.inference.attach.on:
        return
    if config.mode == "serve":
        yield ConfigProblem(KEY, "{...}", "to be left out with mode=serve, which has engines of its own")
        return
    yield from _address(config.inference.attach, dry=config.launcher.name == "dry_run")
    if config.update.chosen != "filesystem":
        yield ConfigProblem("update.transport", config.update.transport,
                            f"filesystem, the only way into engines of another run ({KEY})")  # fmt: skip
    if config.lora.served:
        yield ConfigProblem("lora.serve", "adapter", f"merged: the engines of {KEY} have no places for adapters")


def _address(attach: AttachConfig, *, dry: bool) -> Iterator[ConfigProblem]:
    if (attach.run is None) == (not attach.urls):
        yield ConfigProblem(KEY, {"run": attach.run, "urls": attach.urls}, "either run or urls")
    elif attach.run is not None and not dry:
        plan = read_json(Path(attach.run) / "plan.json")
        if not plan or plan["config"]["mode"] != "serve":
            yield ConfigProblem(f"{KEY}.run", attach.run, "the directory of a run with mode=serve (+experiment=serve)")
    elif attach.urls and (not attach.token_file or not (dry or Path(attach.token_file).is_file())):
        yield ConfigProblem(f"{KEY}.token_file", attach.token_file, "an existing file with the token of the engines")

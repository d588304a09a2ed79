"""Go on with a run from its newest complete checkpoint, or start one again that has none, with its own configuration.

    python -m prime_hpc.resume RUN [OVERRIDES ...]

Overrides are those of `python -m prime_hpc.launch`: keys that may change on resume (`max_steps=200`), `resume=STEP`
for an older checkpoint, and choices such as `launcher=dry_run`, which replace the whole section that was saved.
"""

import sys
import tempfile
from pathlib import Path

import yaml

from prime_hpc import launch
from prime_hpc.cluster.files import write_atomic
from prime_hpc.commands import cli
from prime_hpc.config.compose import GROUPS
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.observe.run_facts import read_run
from prime_hpc.transport.checkpoints import complete_steps


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the launch."""
    parser = cli.parser(__doc__)
    args, overrides = parser.parse_known_args(arguments)

    def resume() -> int:
        with tempfile.TemporaryDirectory() as folder:
            sys.argv[1:] = launch_arguments(args.run, overrides, Path(folder))
            launch.cli()
        return 0

    return cli.run(resume)


def launch_arguments(run_dir: Path, overrides: list[str], folder: Path) -> list[str]:
    """The launch command's arguments; the saved configuration becomes an experiment in the folder `folder`.

    Raises:
        InfrastructureFailure: the run is at work.
    """
    facts = read_run(run_dir)
    if facts.live:
        raise InfrastructureFailure(f"attempt {facts.attempt} of {run_dir} is at work; "
                                    f"python -m prime_hpc.stop {run_dir} ends it")  # fmt: skip
    saved = yaml.safe_load(facts.paths.config.read_text())
    chosen = {override.lstrip("+").partition("=")[0] for override in overrides}
    if saved["launcher"]["name"] == "dry_run":  # a dry run of this very resume wrote what it would have run
        saved["launcher"]["name"] = saved["launcher"]["target"]
    kept = {key: value for key, value in saved.items() if key not in chosen & set(GROUPS)}
    name = f"attempt_{facts.attempt}"
    text = "# @package _global_\n" + yaml.safe_dump(kept, sort_keys=False)
    write_atomic(folder / "experiment" / f"{name}.yaml", text.encode(), durable=False)
    point = "latest" if complete_steps(facts.paths.checkpoints) else "auto"
    place = [f"run.name={run_dir.name}", f"run.output_dir={run_dir.parent}", f"resume={point}"]
    return ["--config-dir", str(folder), f"+experiment={name}", *place, *overrides]


if __name__ == "__main__":
    sys.exit(main())

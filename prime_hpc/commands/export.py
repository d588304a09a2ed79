"""Write the model of a checkpoint in Hugging Face layout, ready for `from_pretrained` and vLLM.

    python -m prime_hpc.export RUN [--step N] [--out DIR] [--merge-lora]

Of a run with adapters the adapters are written, as PEFT would, unless --merge-lora asks for a whole model.
"""

import sys
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.errors import CommandLineError, ConfigProblem
from prime_hpc.transport.checkpoints import complete_steps, resolve


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 where there is nothing to export or no room for it."""
    parser = cli.parser(__doc__)
    parser.add_argument("--step", type=int, help="the checkpoint; the newest when left out")
    parser.add_argument("--out", type=Path, help="a new folder; RUN/export/step_N when left out")
    parser.add_argument("--merge-lora", action="store_true", help="merge adapters into whole models")
    args = parser.parse_args(arguments)

    def write() -> int:
        from prime_hpc.trainer.export import export  # takes seconds to import

        paths = RunPaths(args.run)
        checkpoint = choose(paths, args.step)
        out = args.out or paths.root / "export" / checkpoint.name
        if out.exists():
            raise CommandLineError([ConfigProblem("--out", str(out), "a folder that is not there yet")])
        for folder in export(checkpoint, out, merge_lora=args.merge_lora):
            print(folder)
        return 0

    return cli.run(write)


def choose(paths: RunPaths, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest.

    Raises:
        CommandLineError: there is no such checkpoint.
    """
    steps = complete_steps(paths.checkpoints)
    if not steps:
        raise CommandLineError([ConfigProblem("RUN", str(paths.root), "a run with a complete checkpoint")])
    if step not in (None, *steps):
        raise CommandLineError([ConfigProblem("--step", step, f"one of {', '.join(map(str, steps))}")])
    return resolve(paths.checkpoints, "latest" if step is None else str(step))


if __name__ == "__main__":
    sys.exit(main())

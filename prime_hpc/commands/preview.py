"""Read what a run trains on: samples decoded, with every token in the colour of what becomes of it.

Without colours, as in a pipe, tokens stand between marks such as {+pushed up+}.

python -m prime_hpc.commands.preview RUN [--evaluation] [--step N] [--count 4] [--source NAME]
"""

import sys
from itertools import islice
from pathlib import Path

from rich.console import Console

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.config.checks import source_name
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.observe.preview import Preview
from prime_hpc.observe.records import evaluations, read_records, record_path, recorded_steps
from prime_hpc.plan.run_plan import load


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("--evaluation", action="store_true", help="what was sampled to evaluate, in place of a batch")
    parser.add_argument("--step", type=int, help="the batch or evaluation; the newest by default")
    parser.add_argument("--count", type=int, default=4, help="rollouts")
    parser.add_argument("--source", help="of this source alone; with --evaluation of the first by default")
    args = parser.parse_args(arguments)
    find = evaluated if args.evaluation else trained
    console = Console(highlight=False)
    return cli.run(lambda: show(args.run, find(args.run, args.source), args.step, args.count, args.source, console))


def trained(run: Path, source: str | None) -> Path:
    """Where the records of batches lie, whatever the source."""
    return RunPaths(run).rollouts


def evaluated(run: Path, source: str | None) -> Path:
    """Where the records of the evaluations of `source` lie; of the first one by default."""
    names = (source_name(s) for s in load(RunPaths(run).plan).typed_config().env.eval.sources)
    return evaluations(RunPaths(run).rollouts, source or next(names, ""))


def show(run: Path, folder: Path, step: int | None, count: int, source: str | None, console: Console) -> int:
    """Print a few rollouts of a file in `folder`.

    Raises:
        InfrastructureFailure: there is no record of it.
    """
    recorded = recorded_steps(folder)
    step = step if step is not None else (recorded or [0])[-1]
    if step not in recorded:
        known = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise InfrastructureFailure(f"no rollouts of step {step} in {folder}; recorded are {known}")
    model = load(RunPaths(run).plan).typed_config().model
    preview = Preview.of(model, plain=console.color_system is None)
    if preview is None:
        raise InfrastructureFailure(f"{model.tokenizer or model.path} has no tokenizer.json to decode with")
    wanted = (r for r in read_records(record_path(folder, step)) if source in (None, r["source"]))
    console.print(f"step {step}:", preview.legend(), soft_wrap=True)
    for record in islice(wanted, count):
        for text in preview.render(record):
            console.print(text, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

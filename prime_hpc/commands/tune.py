"""Change a run while it works: pause sampling, let it go on, set a marked value.

    python -m prime_hpc.commands.tune RUN
    python -m prime_hpc.commands.tune RUN paused=true
    python -m prime_hpc.commands.tune RUN paused=false optimizer.lr=2e-6 orchestrator.max_staleness=4

Prints all that is in force. The orchestrator takes changes over within seconds and logs them; they hold for later
attempts too. A pause longer than trainer.batch_timeout_s and env.eval.hold_s together ends the run; after one of the
guard's that is longer than pause.max_s it saves and leaves.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from prime_hpc.cluster.live import Live, read_live, write_live
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.config.live import LIVE, changed, in_force
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.observe.run_facts import read_run
from prime_hpc.plan.run_plan import load


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", type=_pair, help="paused, " + ", ".join(LIVE))
    args = parser.parse_args(arguments)

    def tune() -> int:
        config = read_run(args.run).plan.typed_config()
        live = tuned(args.run, dict(args.changes))
        print(f"paused = {str(live.paused).lower()}{f' since {live.why}' if live.why else ''}")
        for key, value in in_force(changed(config, live.values)).items():
            print(f"{key} = {value!r}")
        return 0

    return cli.run(tune)


def tuned(run: Path, changes: dict[str, Any]) -> Live:
    """Check and write down changes of a run; returns all that are in force.

    Raises:
        ConfigurationError: a key may not change, or the values do not fit.
    """
    paths = RunPaths(run)
    before = read_live(paths.live)
    paused = changes.pop("paused", before.paused)
    if not isinstance(paused, bool):
        raise ConfigurationError([ConfigProblem("paused", paused, "true or false")])
    live = Live(paused=paused, why=before.why if paused else "", values=before.values | changes)
    changed(load(paths.plan).typed_config(), live.values)
    write_live(paths.live, live)
    return live


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    parsed = yaml.safe_load(value)
    try:
        return key, float(value) if isinstance(parsed, str) else parsed  # YAML takes 1e-6 for text
    except ValueError:
        return key, parsed


if __name__ == "__main__":
    sys.exit(main())

"""Start, stop or use a sandbox.

python -m tools.slurm_sandbox up --dir DIRECTORY [--nodes 5 --cpus 4 --gpus 2 --accounting]
eval "$(python -m tools.slurm_sandbox env --dir DIRECTORY)"
python -m tools.slurm_sandbox down --dir DIRECTORY
"""

import argparse
import shlex
import sys
from pathlib import Path

from prime_hpc.errors import PrimeHPCError
from tools.slurm_sandbox.sandbox import SlurmSandbox


def main() -> None:
    options = parser().parse_args()
    try:
        run(options)
    except PrimeHPCError as error:
        sys.exit(f"slurm_sandbox: {error}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.slurm_sandbox", description="A real Slurm on one machine.")
    verbs = top.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start it and wait until every node is idle")
    up.add_argument("--nodes", type=int, default=5, help="virtual nodes; node0 has no GPUs")
    up.add_argument("--cpus", type=int, default=4, help="processors a node")
    up.add_argument("--gpus", type=int, default=2, help="GPUs of every node but node0")
    up.add_argument("--accounting", action="store_true", help="slurmdbd and MariaDB, for sacct")
    verbs.add_parser("down", help="cancel its jobs and stop it; the logs stay")
    verbs.add_parser("env", help="print the shell lines that lead Slurm's commands to it")
    for verb in verbs.choices.values():
        verb.add_argument("--dir", type=Path, required=True, help="where all its files lie")
    return top


def run(options: argparse.Namespace) -> None:
    if options.verb == "up":
        SlurmSandbox(options.dir, options.nodes, options.cpus, options.gpus, options.accounting).up()
        return
    sandbox = SlurmSandbox.attach(options.dir)
    if options.verb == "down":
        sandbox.down()
    else:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in sandbox.env.items()))


if __name__ == "__main__":
    main()

"""Show what a launch would do: who runs where, memory, disk, pace and cost, and when Slurm would start it.

    python -m prime_hpc.plan +experiment=reverse_text launcher=slurm_hetjob cluster=my_site

Arguments are those of `python -m prime_hpc.launch`, with `launcher=dry_run` in place of the launcher that they choose.
"""

import sys

from prime_hpc import launch


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the launch."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    sys.argv[1:] = dry(given)
    launch.cli()
    return 0


def dry(arguments: list[str]) -> list[str]:
    """Arguments of a dry run for the launcher that `arguments` choose."""
    chosen = [a.partition("=")[2] for a in arguments if a.startswith("launcher=")]
    others = [a for a in arguments if not a.startswith("launcher=")]
    target = [f"launcher.target={chosen[-1]}"] if chosen and chosen[-1] != "dry_run" else []
    return [*others, "launcher=dry_run", *target]


if __name__ == "__main__":
    sys.exit(main())

"""An environment worker: `python -m prime_hpc.envs PLAN.json --process env-reverse_text-0`."""

from prime_hpc.cluster.garbage import lasting
from prime_hpc.cluster.role import main

with lasting():
    from prime_hpc.envs.worker import run

if __name__ == "__main__":
    main(run, server=True)

"""An inference engine: `python -m prime_hpc.inference PLAN.json --process inference-0`."""

from prime_hpc.cluster.role import main
from prime_hpc.inference.server import run

if __name__ == "__main__":
    main(run, server=True)

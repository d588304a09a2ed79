"""`python -m prime_hpc.trainer PLAN.json --process trainer-R`: one data-parallel rank of the trainer."""

from prime_hpc.cluster import role
from prime_hpc.trainer.loop import run

if __name__ == "__main__":
    role.main(run, server=False)

"""`python -m prime_hpc.trainer PLAN.json --process trainer-R`: one data-parallel rank of the trainer."""

from prime_hpc.cluster import role
from prime_hpc.cluster.garbage import lasting

with lasting():
    from prime_hpc.trainer import bench, loop


def run(process: role.Role) -> None:
    """Train, or only measure how fast."""
    (bench if process.config.mode == "bench" else loop).run(process)


if __name__ == "__main__":
    role.main(run, server=False)

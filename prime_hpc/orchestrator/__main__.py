"""The orchestrator process: `python -m prime_hpc.orchestrator PLAN.json --process orchestrator-0`."""

import asyncio

from prime_hpc.cluster.role import Role, main
from prime_hpc.orchestrator import bench
from prime_hpc.orchestrator.loop import Orchestrator


def run(role: Role) -> None:
    """Drive the run until it is complete."""
    if role.config.mode == "bench_inference":
        bench.run(role)
        return

    async def orchestrate() -> None:
        await Orchestrator(role).run()

    asyncio.run(orchestrate())


if __name__ == "__main__":
    main(run, server=False)

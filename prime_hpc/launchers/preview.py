"""What a dry run shows beside the plan: estimates, what the cluster lacks for it, and when Slurm would start it."""

from rich.console import Console

from prime_hpc.cluster.gpus import list_gpus
from prime_hpc.config.json_files import hf_config_of
from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.slurm.site import Start, ask_partitions, ask_starts, find_site_problems
from prime_hpc.observe.monitor import read_metrics
from prime_hpc.plan import forecast
from prime_hpc.plan.foresight import foresee
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.workload import measured


def show_estimates(start: RunStart, console: Console) -> None:
    """Memory, disk and time of the plan, from the lengths of earlier attempts where there are any."""
    hf_config = hf_config_of(start.config.model)
    if hf_config is None:
        return
    workload = measured(read_metrics(start.paths.metrics).values(), start.plan.name)
    here = next(iter(list_gpus()), None)
    foresight = foresee(start.plan, start.config, hf_config, here=here, workload=workload)
    console.print("")
    console.print(forecast.render(foresight))


def show_start(plan: RunPlan, console: Console) -> None:
    """When Slurm would start the jobs of the plan; nothing where no Slurm answers."""
    partitions = ask_partitions()
    for start in ask_starts(plan, partitions) if partitions else []:
        console.print(_describe(start), soft_wrap=True)


def check_site(plan: RunPlan) -> None:
    """Compare the plan with this cluster, if this machine belongs to one.

    Raises:
        ConfigurationError: it asks for what the cluster does not have.
    """
    partitions = ask_partitions()
    problems = find_site_problems(plan, partitions) if partitions else []
    if problems:
        raise ConfigurationError(problems)


def _describe(start: Start) -> str:
    limit = f" with a time limit of {start.limit}" if start.limit else ""
    limit += f" on partition {start.partition}" if start.partition else ""
    if start.at is None:
        return f"Slurm would refuse {start.job}: {start.refused}"
    return f"Slurm would start {start.job}{limit} at {start.at:%a %d %b %H:%M:%S}"

"""Runs whose batch scripts and step commands lie in `golden/`; `python -m tests.slurm.scripts` writes them anew."""

import shlex
from pathlib import Path

from prime_hpc.config.compose import compose_run
from prime_hpc.launchers.slurm.sbatch import render_scripts
from prime_hpc.launchers.slurm.steps import step_command
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import units

GOLDEN = Path(__file__).parent / "golden"
SITE = ["cluster.python=/shared/venv/bin/python", "cluster.account=lab", "cluster.time=1-00:00:00"]
EXPERIMENTS = {
    "glm5_swe": [
        "model.path=/models/GLM-5", "cluster=pyxis", "cluster.container.image=/shared/prime_hpc.sqsh",
        "cluster.container.mounts=[/scratch:/scratch]", "cluster.partition=h200", "cluster.gres=gpu:h200",
        "cluster.cpus=96", "cluster.memory='0'", "cluster.qos=long", "cluster.setup=[module load slurm]",
        "cluster.directives={exclusive: true, mail-type: END}", "cluster.components.orchestrator.partition=cpu",
        "cluster.components.orchestrator.spare_nodes=1", "cluster.components.inference.spare_nodes=2",
    ],
    "reverse_text": [
        "model.path=/models/smollm2_sft", "cluster=apptainer", "cluster.container.image=/shared/prime_hpc.sif",
        "cluster.gpus_per_node=4", "cluster.cpus=16", "cluster.constraint=h100", "inference.replicas=6",
        "trainer.ranks=8", "cluster.components.orchestrator.container.runtime=none", "cluster.requeue=false",
    ],
    "reverse_text_cpu": ["model.path=/models/tiny", "cluster=modules", "cluster.gpus_per_node=0", "cluster.memory=8G"],
    "serve": [
        "model.path=/models/large", "cluster.gpus_per_node=8", "inference.replicas=2",
        "inference.vllm.tensor_parallel_size=8", "inference.vllm.data_parallel_size=2",
    ],
}  # fmt: skip
LAUNCHERS = ("slurm_hetjob", "slurm_single", "slurm_linked")


def make_plan(experiment: str, launcher: str) -> RunPlan:
    arguments = [f"+experiment={experiment}", f"launcher={launcher}", *EXPERIMENTS[experiment], *SITE]
    return build_plan(compose_run(arguments), Path("/shared/outputs") / experiment, Attempt(), gpus=0)


def texts(experiment: str, launcher: str) -> dict[str, str]:
    """Golden texts by name of their file: each batch script, and one line for the step of each unit."""
    plan, prefix = make_plan(experiment, launcher), f"{experiment}.{launcher.removeprefix('slurm_')}"
    scripts = {name.replace("job", prefix, 1): text for name, text in render_scripts(plan).items()}
    return scripts | {f"{prefix}.steps": "".join(f"{shlex.join(step_command(plan, unit))}\n" for unit in units(plan))}


def main() -> None:
    for path in GOLDEN.iterdir():
        path.unlink()
    for experiment in EXPERIMENTS:
        for launcher in LAUNCHERS:
            for name, text in texts(experiment, launcher).items():
                (GOLDEN / name).write_text(text)


if __name__ == "__main__":
    main()

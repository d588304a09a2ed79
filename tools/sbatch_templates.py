"""Write sbatch/*.sbatch, scripts that a site copies and edits: `python -m tools.sbatch_templates [--check]`.

Their #SBATCH lines and their launch command come from one configuration each, through the code of every submission, so
that the nodes a script asks for are the nodes its run needs.
"""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.config.compose import compose_run
from prime_hpc.launchers.slurm.allocation import Job, jobs
from prime_hpc.launchers.slurm.sbatch import render_header
from prime_hpc.launchers.slurm.steps import LEAKS, gpu_option
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan

FOLDER = Path(__file__).resolve().parent.parent / "sbatch"
SITE = ["cluster.partition=gpu", "cluster.account=my_account", "cluster.time=24:00:00", 'cluster.memory="0"']
SETUP = ["set -e", "source .venv/bin/activate  # and your modules"]
TWO_NODES = ["cluster.gpus_per_node=8", "cluster.cpus=64"]
WARMED_UP = "model.path=outputs/sft/model"
"""What the script for SFT leaves."""
RL = ["+experiment=reverse_text", WARMED_UP, *TWO_NODES, "inference.replicas=8", "trainer.ranks=8"]
CPU_NODE = ["cluster.components.orchestrator.partition=cpu"]


@dataclass(frozen=True)
class Template:
    """A script: what it is for, the arguments of its launch, and those that only its #SBATCH lines need."""

    purpose: str
    arguments: list[str]
    site: list[str] = field(default_factory=list)
    body: Callable[["Template", str, Job], list[str]] = lambda template, name, _: template.launch(name)

    def launch(self, name: str) -> list[str]:
        """The command that runs in the allocation of its script, the first time and whenever Slurm starts it again."""
        words = [*self.arguments, "launcher.submit=false", f"run.name={name}", "resume=auto"]
        lines = ["exec python -u -m prime_hpc.launch", *(f"    {shlex.quote(word)}" for word in words)]
        return [f"{line} \\" for line in lines[:-1]] + lines[-1:]

    def plan(self, name: str) -> RunPlan:
        config = compose_run([*self.arguments, *SITE, *self.site])
        return build_plan(config, Path("outputs") / name, Attempt(), gpus=0)

    def render(self, name: str) -> str:
        """The whole script."""
        plan = self.plan(name)
        [job] = jobs(plan)
        comment = [f"# {line}" for line in self.purpose.splitlines()]
        header = render_header(name, job, plan.typed_config().cluster, "%x_%j.log")
        return "\n".join(["#!/bin/bash", *comment, *header, "", *SETUP, *self.body(self, name, job), ""])


def preflight(_: Template, name: str, job: Job) -> list[str]:
    """One check on every node of every group, none of which hides the others."""
    modules = {"orchestrator": ["verifiers"], "inference": ["torch", "vllm"], "trainer": ["torch", "transformers"]}
    lines = ["# variables of the first group that srun would take for those of the others"]
    lines += [*textwrap.wrap(f"unset {' '.join(sorted(LEAKS))}", 110, subsequent_indent="unset "), "STATUS=0"]
    for i, block in enumerate(job.blocks):
        srun = ["srun", f"--het-group={i}", f"--nodes={block.nodes}", f"--ntasks={block.nodes}", "--ntasks-per-node=1",
                *gpu_option(block.gpus, block.resources.gres)]  # fmt: skip
        check = ["python -m prime_hpc.cluster.preflight .", *(f"--module {m}" for m in modules[block.name])]
        check += [f"--gpus {block.gpus}"] if block.gpus else []
        lines += [f"{' '.join(srun)} \\", f"    {' '.join(check)} || STATUS=1"]
    return [*lines, 'exit "$STATUS"']


TEMPLATES = {
    "hetjob_rl": Template(
        "RL as one heterogeneous job: orchestrator and environments on a CPU node, engines, trainer.",
        [*RL, "launcher=slurm_hetjob"], CPU_NODE),
    "single_rl": Template(
        "RL in one allocation of equal nodes; here a single node, half for engines and half for the trainer.",
        ["+experiment=reverse_text", WARMED_UP, *TWO_NODES, "inference.replicas=4", "trainer.ranks=4",
         "launcher=slurm_single"]),
    "sft": Template(
        "SFT on two nodes.",
        ["+experiment=reverse_text_sft", *TWO_NODES, "trainer.ranks=16", "launcher=slurm_hetjob"]),
    "inference": Template(
        "Engines only, until the time limit.\n"
        "Their router's address comes in outputs/inference/rendezvous/router-0.json.",
        ["+experiment=serve", "model.path=models/smollm2", *TWO_NODES, "inference.replicas=8",
         "launcher=slurm_hetjob"]),
    "chained_rl": Template(
        "RL for longer than one job may take: before the time limit the run saves, submits its successor, and leaves.",
        [*RL, "launcher=slurm_hetjob", *SITE, *CPU_NODE, "cluster.requeue=false"]),
    "preflight": Template(
        "Are the nodes fit? GPUs, packages, space, and a folder that all of them see. Nothing is trained.",
        [*RL, "launcher=slurm_hetjob"], [*CPU_NODE, "cluster.time=00:10:00", "cluster.signal_s=60"], preflight),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a script is out of date")
    check = parser.parse_args().check
    stale = []
    for name, template in TEMPLATES.items():
        path, text = FOLDER / f"{name}.sbatch", template.render(name)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run 'python -m tools.sbatch_templates'")


if __name__ == "__main__":
    main()

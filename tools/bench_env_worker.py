"""What a turn costs an environment worker: `python -m tools.bench_env_worker [ENVIRONMENT] [OVERRIDES]`.

A run that samples without a trainer (`mode=sample`) from the fake engine, with one worker. From one batch to a later
one the CPU time of every process is set against the turns that were played between: the worker's share is the
environment, the renderer, the client of the engine and the stamps.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.observe.monitor import read_metrics
from prime_hpc.observe.records import read_records, record_path

BATCH, FIRST, LAST = 64, 4, 20
SHORT = {
    "reverse_text": "sampling: {max_tokens: 14}",
    "alphabet_sort": "args: {opening: '{names}', further: '{names}', separator: x, letters: 3}, "
    "sampling: {max_tokens: 14}",
}
"""What makes an environment fit the vocabulary and the context of the tiny model."""
PROCESSES = ("env-bench-0", "orchestrator-0", "inference-0")


def command(root: Path, environment: str, overrides: list[str]) -> list[str]:
    """Starts the run in `root`."""
    source = f"{{id: prime_hpc.envs.{environment}, name: bench, {SHORT[environment]}}}"
    return [sys.executable, "-m", "prime_hpc.launch", "+experiment=reverse_text_cpu", "launcher=local", "mode=sample",
            f"model.path={root / 'model'}", f"run.output_dir={root}", "run.name=bench", f"max_steps={LAST}",
            "seq_len=256", "env.workers=1", f"env.train=[{source}]", f"orchestrator.batch_size={BATCH}",
            "orchestrator.drop_zero_advantage=false", "inference.engine=tests.fake_engine",
            "inference.engine_args={token_s: 0.002}", *overrides]  # fmt: skip


def cpu_seconds(run: Path) -> dict[str, float]:
    """CPU time of each process since its start."""
    rendezvous = Rendezvous(run / "rendezvous", "bench", 1)
    times = {name: psutil.Process((rendezvous.read(name) or {})["pid"]).cpu_times() for name in PROCESSES}
    return {name: spent.user + spent.system for name, spent in times.items()}


def wait_for(run: Path, step: int, process: subprocess.Popen) -> None:
    while step not in read_metrics(run / "metrics.jsonl"):
        if process.poll() is not None:
            sys.exit(f"the run ended before batch {step}")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environment", nargs="?", choices=SHORT, default="reverse_text")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, run = Path(folder), Path(folder, "bench")
        make_tiny_model(root / "model", seed=0)
        with subprocess.Popen(command(root, options.environment, options.overrides),
                              env={**os.environ, "PRIME_HPC_HOME": str(root / "home")}) as process:  # fmt: skip
            wait_for(run, FIRST, process)
            begun, before = time.monotonic(), cpu_seconds(run)
            wait_for(run, LAST - 1, process)
            seconds, after = time.monotonic() - begun, cpu_seconds(run)
        records = [r for step in range(FIRST + 1, LAST) for r in read_records(record_path(run / "rollouts", step))]
    turns = sum(record["num_turns"] for record in records)
    print(f"{len(records)} episodes of {turns / len(records):.1f} turns in {seconds:.1f} s")
    for name in PROCESSES:
        print(f"{name:>16} {1000 * (after[name] - before[name]) / turns:6.2f} ms of CPU a turn")


if __name__ == "__main__":
    main()

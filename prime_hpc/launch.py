"""The entry point: compose the configuration, check it, make the plan, hand it to a launcher.

python -m prime_hpc.launch +experiment=reverse_text_cpu
python -m prime_hpc.launch -m +experiment=reverse_text_cpu seed=1,2,3
python -m prime_hpc.launch +experiment=reverse_text launcher=slurm_hetjob cluster=my_site
python -m prime_hpc.launch +experiment=reverse_text launcher=dry_run launcher.target=slurm_hetjob
python -m prime_hpc.launch +experiment=reverse_text run.name=mine resume=latest
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from prime_hpc.config import compose
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.schema import parse
from prime_hpc.envs.load import find_source_problems
from prime_hpc.errors import ConfigProblem, ConfigurationError, PrimeHPCError
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.registry import launch_plan
from prime_hpc.models.degrees import find_parallel_problems
from prime_hpc.models.families import find_model_problems

EXIT_CONFIGURATION = 2


@hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name=compose.PRIMARY)
def main(composed: DictConfig) -> None:
    """One run of a composed configuration; exits with the launcher's code."""
    try:
        code = _run(composed)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    except PrimeHPCError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    if code:
        sys.exit(code)


def _run(composed: DictConfig) -> int:
    facts = HydraConfig.get()
    values, experiment = _resolved(composed), facts.runtime.choices.get("experiment")
    if experiment and "experiment" in values:
        raise ConfigurationError([compose.misplaced(experiment, values["experiment"])])
    config = parse(values, Path(facts.runtime.cwd))
    problems = [*find_conflicts(config), *find_model_problems(config), *find_parallel_problems(config),
                *find_source_problems(config)]  # fmt: skip
    if problems:
        raise ConfigurationError(problems)
    stack = compose.layers(dict(facts.runtime.choices), list(facts.overrides.task), _search_path())
    start = RunStart.resolve(config, experiment=experiment, origins=stack)
    return launch_plan(start)


def _resolved(composed: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(composed, resolve=True)
    except InterpolationResolutionError as error:
        reason = str(error).splitlines()[0]
        problem = ConfigProblem(str(error.full_key), "${...}", f"a reference that resolves ({reason})")
        raise ConfigurationError([problem]) from error


def _search_path() -> list[Path]:
    """Configuration folders, the user's `--config-dir` first."""
    arguments = sys.argv[1:]
    extra = [Path(b) for a, b in zip(arguments, arguments[1:], strict=False) if a in ("--config-dir", "-cd")]
    extra += [Path(a.partition("=")[2]) for a in arguments if a.startswith("--config-dir=")]
    return [*extra, compose.conf_dir()]


def cli() -> None:
    """Check folders and choices of groups, let unknown keys through to the schema, and start Hydra."""
    folders = _search_path()
    problems = compose.absent_folders(folders) or compose.unknown_choices(sys.argv[1:], folders)
    if problems:
        print(ConfigurationError(problems), file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    sys.argv[1:] = compose.tolerant(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # has Hydra raise what it would print
    try:
        main()
    except CompactHydraException as error:
        print(compose.explain(error), file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    except yaml.YAMLError as error:
        print(compose.explain_yaml(error), file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    cli()

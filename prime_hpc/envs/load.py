"""Is a source's environment installed? Answered without importing it, nor verifiers, so that a launcher can ask."""

import importlib.util
import pkgutil
from pathlib import Path

from prime_hpc.config.env import TaskSource
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, nearest_name


def find_source_problems(config: RunConfig) -> list[ConfigProblem]:
    """One problem for every training or evaluation source whose environment cannot be found here."""
    keyed = [(f"env.train.{i}", source) for i, source in enumerate(config.env.train)]
    keyed += [(f"env.eval.sources.{i}", source) for i, source in enumerate(config.env.eval.sources)]
    return [problem for key, source in keyed for problem in check_source(source, key)]


def check_source(source: TaskSource, key: str = "env.train") -> list[ConfigProblem]:
    """The problem of a source whose module cannot be found, if there is one; `key` is where it stands."""
    if source.id.endswith(".py"):
        expected = "the name of a module, not of its file, which lies where the launch begins or in PYTHONPATH"
        return [ConfigProblem(f"{key}.id", source.id, expected, Path(source.id).stem)]
    module = module_name(source.id)
    if module in _verifiers_tasksets() or _is_importable(module):
        return []
    bundled = [*bundled_environments(), *_verifiers_tasksets()]
    expected = f"an installed module of a verifiers taskset; bundled are {', '.join(bundled)}"
    return [ConfigProblem(f"{key}.id", source.id, expected, _nearest(source.id, bundled))]


def module_name(environment_id: str) -> str:
    """The module an environment id stands for: `owner/my-env@1.0` is installed as `my_env`."""
    return environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def bundled_environments() -> list[str]:
    """Ids of the environments that ship with this product."""
    return [f"{__package__}.{m.name}" for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.ispkg]


def _verifiers_tasksets() -> list[str]:
    """Ids that verifiers itself ships. Its folder is listed, as importing it would take seconds."""
    spec = importlib.util.find_spec("verifiers")
    folders = [str(Path(folder, "v1", "tasksets")) for folder in spec.submodule_search_locations] if spec else []
    return [m.name for m in pkgutil.iter_modules(folders) if m.ispkg]


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or the id is no module name
        return False


def _nearest(environment_id: str, known: list[str]) -> str | None:
    """A mistyped id is compared as a whole first, then by its last part: `revers_text` means the bundled one too."""
    by_last_part = {name.rpartition(".")[2]: name for name in known}
    last = nearest_name(module_name(environment_id).rpartition(".")[2], list(by_last_part), likeness=0.75)
    return nearest_name(environment_id, known) or (by_last_part[last] if last else None)

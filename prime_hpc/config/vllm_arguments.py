"""What the vLLM of this machine knows, found by reading its source: importing it takes longer than all else of a
launch."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prime_hpc.config.cluster import component
from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, nearest_name

SOURCES = ("engine/arg_utils.py", "entrypoints/*/cli_args.py")
"""Where vLLM declares its arguments, of the engine and of `vllm serve`; 0.25 and 0.32 have the second in different
folders."""
SAMPLING = "sampling_params.py"
NOT_PLAIN = ("Params", "OutputKind")
"""Types of parameters that no plain data gives."""


def find_unknown_arguments(config: RunConfig) -> Iterator[ConfigProblem]:
    """Every name under a `vllm` key that the vLLM of this machine does not know, if its engines are what runs."""
    known = _known(_folder()) if _runs_here(config) else frozenset()
    sections = {"inference.vllm": config.inference.vllm}
    sections |= {f"frozen.{name}.vllm": model.vllm for name, model in config.frozen.items()}
    for key, given in sections.items():
        for name in given if known else ():
            if name not in known:
                nearest = nearest_name(name, sorted(known))
                yield ConfigProblem(f"{key}.{name}", given[name], "an argument of `vllm serve`", nearest)


def sampling_parameters(config: RunConfig) -> list[str]:
    """Names of the parameters of a request that plain data gives; empty where that vLLM is not what runs."""
    path = (_folder() or Path()) / SAMPLING
    return _parameters(path) if _runs_here(config) and path.is_file() else []


@cache
def _parameters(path: Path) -> list[str]:
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [pair for owner in classes if owner.name == "SamplingParams" for pair in _annotated(owner)]
    return sorted(name for name, kind in fields if name[0] != "_" and not any(word in kind for word in NOT_PLAIN))


def _runs_here(config: RunConfig) -> bool:
    """Whether the engines are vLLM's, from the installation that this process belongs to."""
    elsewhere = config.cluster.python or component(config.cluster, "inference").container.image
    return config.inference.engine == InferenceConfig.engine and not (config.launcher.on_slurm and elsewhere)


def _folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _known(folder: Path | None) -> frozenset[str]:
    """Names of all arguments: fields of the classes of arguments, and options beside them. Empty without vLLM."""
    texts = [path.read_text() for source in SOURCES for path in (folder.glob(source) if folder else ())]
    options = {option.replace("-", "_") for text in texts for option in re.findall(r'"--([a-z][\w-]+)"', text)}
    return frozenset(options.union(*map(_fields, texts)))


def _fields(text: str) -> set[str]:
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name.endswith("Args")]
    return {name for owner in classes for name, _ in _annotated(owner)}


def _annotated(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names and types of the fields of a class."""
    for field in owner.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, ast.unparse(field.annotation)

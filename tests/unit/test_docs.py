"""What the documentation names must exist: links, modules, experiments, configuration keys."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra_plugins.prime_hpc import SweepConfig
from prime_hpc.config.compose import GROUPS, conf_dir, options
from prime_hpc.config.schema import known_keys
from tools import config_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(p for d in ("docs", "examples", "sbatch") for p in (ROOT / d).rglob("*.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
MODULE = re.compile(r"python -m ((?:prime_hpc|tools)[\w.]*)")
LAUNCH = re.compile(r"python -m prime_hpc\.launch ([^#`\n]+)")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every launch command of the documentation, and of `--help`, with its page."""
    for page in [*PAGES, conf_dir() / "run.yaml"]:
        for arguments in LAUNCH.findall(page.read_text().replace("\\\n", " ")):
            yield page.name, shlex.split(arguments)


def test_configuration_reference_is_up_to_date():
    page = config_reference.REFERENCE.read_text()
    assert page == config_reference.reference(), "run python -m tools.config_reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_of_commands_exist(page: Path):
    modules = {name.rstrip(".") for name in MODULE.findall(page.read_text())}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_launch_commands_use_known_keys_and_choices():
    found = list(commands())
    assert len(found) > 10
    wrong = [(page, argument) for page, arguments in found for argument in arguments if not is_known(argument)]
    assert wrong == []


def is_known(argument: str) -> bool:
    """A flag, a choice of a group that has a file, or a key of the schema."""
    key, equals, value = argument.lstrip("+").partition("=")
    if not equals:
        return argument in ("-m", "--config-dir", "FOLDER")
    if key in GROUPS:
        return value in options(key, [conf_dir()])
    *section, leaf = key.split(".")
    if section == ["hydra", "launcher"]:
        return leaf in SweepConfig.__dataclass_fields__
    if section == ["inference", "vllm"]:
        return True  # free-form: vLLM's own arguments
    return leaf in known_keys(tuple(int(part) if part.isdigit() else part for part in section))

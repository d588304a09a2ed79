"""Loading without a library that is there, and with it afterwards."""

import importlib
import sys

import pytest

from prime_hpc.envs import light


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small modules in place of torch and of transformers, none of them loaded."""
    monkeypatch.setattr(light, "HEAVY", "this")
    monkeypatch.setattr(light, "REMEMBERS", "__hello__")
    for name in ("this", "__hello__"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_torch_is_hidden_and_who_remembers_that_is_forgotten(libraries: None) -> None:
    with light.without_torch():
        importlib.import_module("__hello__")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("this")
    assert not {"this", "__hello__"} & set(sys.modules)
    assert importlib.import_module("this")


@pytest.mark.parametrize("loaded", ["this", "__hello__"])
def test_what_an_environment_has_loaded_stays(libraries: None, loaded: str) -> None:
    importlib.import_module(loaded)
    with light.without_torch():
        assert importlib.import_module("this") and loaded in sys.modules
    assert {"this", loaded} <= set(sys.modules)

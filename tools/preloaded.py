"""Imports what the processes of a run need, so that those which are forked from this one begin with it."""

from importlib import import_module

from prime_hpc.cluster.garbage import lasting

MODULES = ("tools.forked", "prime_hpc.trainer.loop", "prime_hpc.orchestrator.loop", "prime_hpc.envs.worker",
           "prime_hpc.envs.reverse_text", "tests.fake_engine.__main__")  # fmt: skip

with lasting():
    for name in MODULES:
        import_module(name)

"""Where the policy's engines are: those of this run, of a fleet that outlives runs, or at addresses that were given."""

import time
from abc import ABC, abstractmethod
from pathlib import Path

from prime_hpc.cluster import control
from prime_hpc.cluster.addresses import engine_addresses
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import POLL_S
from prime_hpc.cluster.role import Role
from prime_hpc.errors import ConfigurationError, DeadlineExceeded
from prime_hpc.observe.resumption import find_ended_fleet


class Directory(ABC):
    """Engines by name. All methods block, on files only."""

    waited_for = "the engines"

    def __init__(self, role: Role):
        self._me = role.process.name

    @abstractmethod
    def look(self) -> dict[str, str | None]:
        """The address of every engine, None for one that is starting or gone."""

    @abstractmethod
    def ask_restart(self, engine: str, why: str) -> None:
        """Have whoever owns an engine start it again."""

    def wait(self, timeout_s: float) -> dict[str, str]:
        """The addresses of all engines, once each has one.

        Raises:
            DeadlineExceeded: they are not there within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.look()
            missing = [name for name, url in found.items() if not url]
            if found and not missing:
                return {name: url for name, url in found.items() if url}
            if time.monotonic() > deadline:
                raise DeadlineExceeded(self._me, "base_url", missing[0] if missing else self.waited_for, timeout_s)
            time.sleep(POLL_S)


class OwnEngines(Directory):
    """The engines of this run's plan."""

    def __init__(self, role: Role):
        super().__init__(role)
        self._rendezvous, self._control = role.rendezvous, role.paths.control
        self._names = [process.name for process in role.plan.engines()]

    def look(self) -> dict[str, str | None]:
        return {name: (self._rendezvous.read(name) or {}).get("base_url") for name in self._names}

    def ask_restart(self, engine: str, why: str) -> None:
        control.ask(self._control, "restart", why, unit=engine, by=self._me)


class ServedEngines(Directory):
    """The engines of another run, in whatever attempt that is now."""

    def __init__(self, role: Role, run_dir: Path):
        super().__init__(role)
        self._paths = RunPaths(run_dir)
        self.waited_for = f"the fleet in {run_dir}"

    def look(self) -> dict[str, str | None]:
        return engine_addresses(self._paths.root)

    def wait(self, timeout_s: float) -> dict[str, str]:
        """As ever, unless the fleet has ended.

        Raises:
            ConfigurationError: it has.
        """
        if problem := find_ended_fleet(self._paths.root):
            raise ConfigurationError([problem])
        return super().wait(timeout_s)

    def ask_restart(self, engine: str, why: str) -> None:
        control.ask(self._paths.control, "restart", why, unit=engine, by=f"{self._me} of an attached run")


class GivenEngines(Directory):
    """Engines at fixed addresses, whose owner is out of reach."""

    def __init__(self, role: Role, urls: list[str]):
        super().__init__(role)
        self._addresses: dict[str, str | None] = {f"engine-{i}": url.rstrip("/") for i, url in enumerate(urls)}
        self._log = role.log

    def look(self) -> dict[str, str | None]:
        return self._addresses

    def ask_restart(self, engine: str, why: str) -> None:
        self._log.error("%s must be started again by hand: %s", self._addresses[engine], why)


def directory_of(role: Role) -> Directory:
    """Where this run's policy is served."""
    attach = role.config.inference.attach
    if attach.run is not None:
        return ServedEngines(role, Path(attach.run).absolute())
    return GivenEngines(role, attach.urls) if attach.urls else OwnEngines(role)

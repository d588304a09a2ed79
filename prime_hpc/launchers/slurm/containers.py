"""Processes inside an image: what is mounted, and how Apptainer or Pyxis is told."""

from prime_hpc.config.cluster import ContainerConfig


def mounts(run_dir: str, model: str, container: ContainerConfig) -> list[str]:
    """What the image sees, as `OUTSIDE:INSIDE`: the run, the model, then what the site adds."""
    own = [f"{folder}:{folder}" for folder in (run_dir, model) if folder.startswith("/")]
    return [*own, *(container.mounts or [])]


def srun_options(container: ContainerConfig, inside: list[str]) -> list[str]:
    """Options of Pyxis, a plug-in of srun. The home is mounted since the run's secrets lie there."""
    if container.runtime != "pyxis":
        return []
    return [f"--container-image={container.image}", f"--container-mounts={','.join(inside)}", "--container-mount-home",
            *(container.args or [])]  # fmt: skip


def wrap(container: ContainerConfig, inside: list[str], command: list[str], *, gpus: bool) -> list[str]:
    """`command` inside the image where Apptainer runs it, which mounts the home by itself."""
    if container.runtime != "apptainer":
        return command
    assert container.image is not None  # checked with the configuration
    return ["apptainer", "exec", *(["--nv"] if gpus else []), *(f"--bind={m}" for m in inside), *(container.args or []),
            container.image, *command]  # fmt: skip

"""A vLLM engine of a run."""

from prime_hpc.cluster.role import Role, main
from prime_hpc.inference import arguments, server


def run(role: Role) -> None:
    """Serve the policy with vLLM.

    Raises:
        ConfigurationError: vLLM does not know an argument of `inference.vllm`.
        InferenceFailure: the engine died.
    """
    arguments.set_environment(role)
    args = arguments.parse(arguments.arguments(role))

    from prime_hpc.inference import adapter

    server.run(role, lambda: adapter.start(args, role.config.lora.served))


if __name__ == "__main__":
    main(run, server=True)

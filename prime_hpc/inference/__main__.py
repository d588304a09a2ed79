"""A vLLM engine of a run."""

from prime_hpc.cluster.garbage import lasting
from prime_hpc.cluster.role import Role, main
from prime_hpc.inference import arguments, nodes, server
from prime_hpc.inference.served import require_files


def run(role: Role) -> None:
    """Serve the policy with vLLM, or compute for the node of this engine that does.

    Raises:
        ConfigurationError: the model lacks files, or vLLM does not know an argument of `inference.vllm`.
        InferenceFailure: the engine died.
    """
    require_files(role)
    arguments.set_environment(role)
    with lasting():  # vLLM is imported
        args = arguments.parse(arguments.arguments(role) | nodes.meeting(role))
    if args.headless:
        nodes.compute(role, args)

    from prime_hpc.inference import adapter

    server.run(role, lambda: adapter.start(args, role.config.lora.served))


if __name__ == "__main__":
    main(run, server=True)

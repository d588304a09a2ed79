"""The engine of this product over a vLLM that does without torchvision, which is missing beside its CPU build: it takes
images, but no videos."""

import sys
from types import ModuleType, SimpleNamespace

from prime_hpc.cluster.role import Role, main
from prime_hpc.inference import __main__ as engine
from prime_hpc.inference import arguments

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
STUB = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def run(role: Role) -> None:
    """Serve until SIGTERM."""
    arguments.set_environment(role)
    _do_without_torchvision()
    engine.run(role)


def _do_without_torchvision() -> None:
    """Import what only names torchvision, and make vLLM's Qwen3-VL known by its class, as what looks at the module
    would otherwise run in a process of its own."""
    import transformers.image_processing_backends  # noqa: F401  decides here that there is no torchvision

    modules = {name: ModuleType(name) for name in STUB}
    for name in STUB[1:]:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, modules[name])
    sys.modules.update(modules)
    import transformers.models.qwen2_vl.image_processing_qwen2_vl  # noqa: F401

    for name in STUB:
        del sys.modules[name]
    from transformers import Qwen3VLProcessor
    from transformers.processing_utils import VideosKwargs
    from vllm import ModelRegistry
    from vllm.model_executor.models import qwen3_vl

    class ImageProcessor(Qwen3VLProcessor):
        """Loads nothing for videos, whose sizes vLLM asks for all the same."""

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)
            self.video_processor = SimpleNamespace(valid_kwargs=VideosKwargs, size=image_processor.size, merge_size=2,
                                                   temporal_patch_size=2)  # fmt: skip

    qwen3_vl.Qwen3VLProcessor = ImageProcessor
    ModelRegistry.register_model(ARCHITECTURE, qwen3_vl.Qwen3VLForConditionalGeneration)


if __name__ == "__mp_main__":  # the process of vLLM's that computes begins with this module, too
    _do_without_torchvision()
if __name__ == "__main__":
    main(run, server=True)

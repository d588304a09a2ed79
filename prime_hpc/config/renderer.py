"""What turns messages into tokens: the policy's renderer with its options, and what is wrong with them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from prime_hpc.config.json_files import read_json
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.errors import ConfigProblem, nearest_name

if TYPE_CHECKING:
    from renderers import RendererConfig

KEY = "model.renderer_options"
PARSERS = ("tool_parser", "reasoning_parser")
"""What `default` knows beside the variables of the chat template."""
GIVEN = ("messages", "tools", "add_generation_prompt", "name")
"""Variables of a template that are not for the user to set, and how the renderer itself is chosen."""


def renderer_fields(model: ModelConfig) -> dict[str, Any]:
    """The renderer as the `renderers` package reads it."""
    return {**model.renderer_options, "name": model.renderer}


def renderer_config(model: ModelConfig) -> "RendererConfig":
    """The same as an object of that package.

    Raises:
        ValueError: it knows no such renderer, or the renderer no such option.
    """
    # here and not above: the package takes a second to load, and most roles never need it
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    return TypeAdapter(RendererConfig).validate_python(renderer_fields(model))


def template_options(model: ModelConfig) -> dict[str, Any]:
    """The options that `default` hands to the chat template."""
    return {name: value for name, value in model.renderer_options.items() if name not in PARSERS}


def find_renderer_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """A renderer that does not exist, and options that it does not have or that contradict each other."""
    model = config.model
    if model.renderer == "default":
        yield from _of_template(model) if model.renderer_options else ()
        return
    from pydantic import ValidationError

    if "name" in model.renderer_options:
        yield ConfigProblem(f"{KEY}.name", model.renderer_options["name"], "to be left out: model.renderer is the name")
        return
    try:
        renderer_config(model)
    except ValidationError as error:
        yield from (_problem(model, item) for item in error.errors(include_url=False))
    except Exception as error:  # a renderer of the user's is imported
        yield ConfigProblem(KEY, model.renderer_options, f"a renderer that loads ({type(error).__name__}: {error})")


def _of_template(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Options of `default`: names of parsers, and what the chat template reads, if that is here."""
    from renderers import parsers

    names = {"tool_parser": parsers.TOOL_PARSERS, "reasoning_parser": parsers.REASONING_PARSERS}
    template = _template(Path(model.tokenizer or model.path))
    words = sorted({*re.findall(r"[A-Za-z_]\w*", template or ""), *PARSERS} - {*GIVEN})
    for name, value in model.renderer_options.items():
        key = f"{KEY}.{name}"
        if name == "thinking_retention":
            yield ConfigProblem(key, value, "to be left out: only the renderer of a model's family can keep thinking")
        elif name in names:
            valid = sorted(names[name])
            if value is not None and value not in valid:
                yield ConfigProblem(key, value, "one of " + ", ".join(valid), nearest_name(str(value), valid))
        elif name in GIVEN or (template is not None and name not in words):
            expected = f"{' or '.join(PARSERS)}, or a variable that the chat template reads"
            yield ConfigProblem(key, value, expected, nearest_name(name, words))


def _template(folder: Path) -> str | None:
    """The chat template of a tokenizer, all of them where there are several; None where it is not here."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = (read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    return str(template) if template else None


def _problem(model: ModelConfig, item: Any) -> ConfigProblem:
    """A mistake that the package found, in our words."""
    place, kind, value = item["loc"], item["type"], item["input"]
    if kind == "union_tag_invalid":
        valid = [name.strip("' ") for name in item["ctx"]["expected_tags"].split(",")]
        return ConfigProblem("model.renderer", model.renderer, "one of " + ", ".join(valid),
                             nearest_name(model.renderer, valid))  # fmt: skip
    key = ".".join([KEY, *map(str, place[1:])])
    if kind == "extra_forbidden":
        valid = _options(model)
        expected = f"an option of the renderer {model.renderer!r}: " + ", ".join(valid)
        return ConfigProblem(key, value, expected, nearest_name(str(place[-1]), valid))
    if kind == "missing":
        return ConfigProblem(key, None, "a value, it has no default")
    if kind == "value_error":
        return ConfigProblem(key, model.renderer_options, f"what the renderer takes ({item['ctx']['error']})")
    return ConfigProblem(key, value, item["msg"].removeprefix("Input should be "))


def _options(model: ModelConfig) -> list[str]:
    """Names of the options of a renderer, those of a renderer of the user's too."""
    from renderers import RendererConfig
    from renderers.custom import load_custom_renderer

    union, _ = get_args(RendererConfig)
    fields = dict(next(c.model_fields for c in get_args(union) if c.model_fields["name"].default == model.renderer))
    if model.renderer == "custom":
        fields |= load_custom_renderer(model.renderer_options["import_path"]).config_class.model_fields
    return [name for name in fields if name != "name"]

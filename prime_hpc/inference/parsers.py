"""Which of vLLM's parsers read a model's tool calls and reasoning out of a chat completion.

A fine-tune keeps its family's format and loses its name, so the choice goes by what lies in the model's folder: the
architecture, and the format that the chat template teaches. Token-in requests, those of training, are parsed by nobody.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from prime_hpc.config.json_files import read_json


@dataclass(frozen=True)
class Format:
    """A parser for models whose `model_type` matches a pattern and whose chat template holds all of `marks`."""

    parser: str | None
    model_type: str = "*"
    marks: tuple[str, ...] = ()

    def fits(self, model_type: str, template: str) -> bool:
        return fnmatchcase(model_type, self.model_type) and all(mark in template for mark in self.marks)


TOOL_CALLS = (
    Format("openai", "gpt_oss"),
    Format("deepseek_v4", "deepseek_v4*"),
    Format("deepseek_v32", "deepseek_v32"),
    Format("deepseek_v3", "deepseek_v3", ("tool▁call", "```json")),
    Format("deepseek_v31", "deepseek_v3", ("tool▁call",)),
    Format("kimi_k2", "kimi_k2", ("tool_call",)),
    Format("minimax_m2", "minimax_m2"),
    Format("poolside_v1", "laguna"),
    Format("step3p5", "step3p5"),
    Format("qwen3_coder", marks=("<function=",)),
    Format("glm47", marks=("{function-name}<arg_key>",)),
    Format("glm45", marks=("<arg_key>",)),
    Format("hermes", marks=("<tool_call>", '"arguments"')),
)  # fmt: skip
"""The first that fits. `qwen3_coder` is the format of Qwen3-Coder, Qwen3.5 and later, Nemotron 3, INTELLECT-3 and
Trinity Large Thinking; `hermes` that of Qwen2.5, Qwen3 and other Trinity models. Source: vLLM's documentation, "Tool
calling"."""

REASONING = (
    Format(None, "gpt_oss"),
    Format("deepseek_v4", "deepseek_v4*"),
    Format("deepseek_v3", "deepseek_v32"),
    Format("deepseek_v3", "deepseek_v3", ("<think>", "thinking")),
    Format("minimax_m2_append_think", "minimax_m2"),
    Format("poolside_v1", "laguna"),
    Format("step3p5", "step3p5"),
    Format("kimi_k2", "kimi_k2", ("<think>",)),
    Format("nemotron_v3", "nemotron_h*", ("<think>",)),
    Format("qwen3", "qwen3_5*"),
    Format("qwen3", "qwen3*", ("enable_thinking",)),
    Format("deepseek_r1", "glm4_moe", ("<function=",)),
    Format("glm45", "glm*_moe*", ("<think>",)),
    Format("deepseek_r1", marks=("<think>",)),
)  # fmt: skip
"""The first that fits; vLLM parses GPT-OSS without being told. `deepseek_r1` is the format of models that always think
(R1, Qwen3 Thinking, INTELLECT-3, Trinity). Source: vLLM's documentation, "Reasoning outputs"."""


def choose(model: Path, tokenizer: Path) -> dict[str, str]:
    """vLLM's arguments `tool_call_parser` and `reasoning_parser`, each where the model has such a format."""
    model_type = (read_json(model / "config.json") or {}).get("model_type", "")
    template = chat_template(tokenizer)
    tables = {"tool_call_parser": TOOL_CALLS, "reasoning_parser": REASONING}
    chosen = {name: next((f.parser for f in table if f.fits(model_type, template)), None)
              for name, table in tables.items()}  # fmt: skip
    return {name: parser for name, parser in chosen.items() if parser}


def chat_template(tokenizer: Path) -> str:
    """The chat template in a tokenizer's folder, several of them one after the other; empty where there is none."""
    file = tokenizer / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    found = (read_json(tokenizer / "tokenizer_config.json") or {}).get("chat_template") or ""
    return found if isinstance(found, str) else "\n".join(named["template"] for named in found)

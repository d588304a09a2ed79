"""Options of the renderer: refused where it has no such, and in force wherever messages become tokens."""

import asyncio
from pathlib import Path

import pytest
from renderers import create_renderer
from transformers import AutoTokenizer

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.renderer import renderer_config
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import Conversation
from prime_hpc.config.trainer import SFTConfig
from prime_hpc.models.tiny import CHAT_TEMPLATE, EOS, make_char_tokenizer
from prime_hpc.trainer.sft_data import Row, make_render
from tests.integration.scripted_engine import ScriptedEngine

MARKED = "{% if mark %}<eos>{% endif %}" + CHAT_TEMPLATE
ONE_TURN = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]


@pytest.fixture(scope="module")
def marking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template reads a variable."""
    folder = tmp_path_factory.mktemp("marking")
    tokenizer = make_char_tokenizer(folder)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return folder


def wrong(renderer: str, path: Path | str = "", **options: object) -> list[str]:
    config = RunConfig(model=ModelConfig(path=str(path), renderer=renderer, renderer_options=options))
    return [str(problem) for problem in find_conflicts(config) if problem.key.startswith("model.renderer")]


@pytest.mark.parametrize(
    ("renderer", "options", "expected"),
    [
        ("qwn3", {}, "model.renderer = 'qwn3': expected one of auto, default, qwen3, "),
        ("qwen3", {"enable_thinkin": True}, "model.renderer_options.enable_thinkin = True: expected an option of the "
         "renderer 'qwen3': thinking_retention, enable_thinking; did you mean 'enable_thinking'?"),
        ("qwen3", {"name": "x"}, "model.renderer_options.name = 'x': expected to be left out"),
        ("glm-5", {"thinking_retention": "al"}, "model.renderer_options.thinking_retention = 'al': expected "
         "'tool_cycle' or 'all'"),
        ("glm-5", {"clear_thinking": True, "thinking_retention": "all"}, "model.renderer_options = {'clear_thinking': "
         "True, 'thinking_retention': 'all'}: expected what the renderer takes (clear_thinking=True implies"),
        ("custom", {}, "model.renderer_options.import_path = None: expected a value"),
        ("custom", {"import_path": "nowhere.Mine"}, "model.renderer_options = {'import_path': 'nowhere.Mine'}: "
         "expected a renderer that loads (ModuleNotFoundError: No module named 'nowhere')"),
        ("default", {"reasoning_parser": "thnk"}, "model.renderer_options.reasoning_parser = 'thnk': expected one of "
         "think; did you mean 'think'?"),
        ("default", {"thinking_retention": "all"}, "model.renderer_options.thinking_retention = 'all': expected to be "
         "left out: only the renderer of a model's family"),
        ("default", {"tools": []}, "model.renderer_options.tools = []: expected tool_parser or reasoning_parser, or"),
    ],
)  # fmt: skip
def test_a_renderer_is_refused_with_what_it_does_not_take(renderer: str, options: dict, expected: str) -> None:
    [problem] = wrong(renderer, **options)
    assert problem.startswith(expected)


def test_a_renderer_of_the_user_s_has_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from renderers import Qwen3RendererConfig\nfrom renderers.qwen3 import Qwen3Renderer\n\n\n"
    code += "class Mine(Qwen3Renderer):\n    config_class = Qwen3RendererConfig\n"
    (tmp_path / "renderer_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert wrong("custom", import_path="renderer_of_mine.Mine", enable_thinking=False) == []
    [problem] = wrong("custom", import_path="renderer_of_mine.Mine", enable_thinkin=False)
    assert problem.endswith("thinking_retention, import_path, enable_thinking; did you mean 'enable_thinking'?")


def test_what_a_renderer_takes_passes(marking: Path) -> None:
    assert wrong("glm-5", thinking_retention="all") == wrong("nemotron-3", truncate_history_thinking=False) == []
    assert wrong("default", marking, mark=True, reasoning_parser="think", tool_parser=None) == []
    assert wrong("default", "not/here", mark=True) == [], "the template may lie on another machine"


def test_a_variable_that_the_template_does_not_read_is_named(marking: Path) -> None:
    assert wrong("default", marking, marks=True) == [
        "model.renderer_options.marks = True: expected tool_parser or reasoning_parser, or a variable that the chat "
        "template reads; did you mean 'mark'?"
    ]


def test_thinking_retention_keeps_one_branch_over_a_new_user_turn(tiny_vision_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_vision_model)

    def continues(**options: object) -> bool:
        model = ModelConfig(renderer="qwen3", renderer_options=options)
        renderer = create_renderer(tokenizer, renderer_config(model))
        prompt = renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
        reply = tokenizer.encode("<think>b</think>c<|im_end|>")
        return renderer.bridge_to_next_turn(prompt, reply, [{"role": "user", "content": "d"}]) is not None

    assert not continues()
    assert continues(thinking_retention="all")


def test_rows_of_sft_are_rendered_with_the_options(marking: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(marking)

    def render(**options: object) -> Row:
        config = SFTConfig(roles=["assistant", "user"])
        return make_render(tokenizer, ModelConfig(renderer_options=options), config)(Conversation(ONE_TURN))

    plain, marked = render(), render(mark=True, tool_parser=None)
    assert marked.token_ids.tolist() == [tokenizer.eos_token_id, *plain.token_ids]
    assert marked.mask.tolist() == [False, *plain.mask] and plain.mask.sum() == 5, "a text, a reply and its end"


def test_episodes_are_rendered_with_the_options(marking: Path) -> None:
    from prime_hpc.config.env import SourceConfig
    from prime_hpc.envs.environment import Environment, offer_token
    from prime_hpc.transport.messages import PolicyVersion, RunRollout

    args = {"num_tasks": 1, "alphabet": "abcd"}
    source = SourceConfig(id="prime_hpc.envs.reverse_text", args=args)
    offer_token("t")

    async def prompt(**options: object) -> list[int]:
        model = ModelConfig(path=str(marking), renderer_options=options)
        environment = Environment("words", source, model)
        request = RunRollout(rollout_id="r", task_index=0, base_url=engine.base_url, model="policy",
                             version=PolicyVersion(0, 0), sampling={})  # fmt: skip
        async with environment.serving():
            episode = await environment.run(request)
        return episode.traces[0].branches[0].token_ids

    with ScriptedEngine("t") as engine:
        plain, marked = asyncio.run(prompt()), asyncio.run(prompt(mark=True))
    assert marked == [AutoTokenizer.from_pretrained(marking).convert_tokens_to_ids(EOS), *plain]

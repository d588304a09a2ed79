"""The bundled environments of several turns, seats and tools, played by scripted policies."""

import asyncio
import json
import re
from itertools import islice

import pytest
import verifiers.v1 as vf

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.sft_rows import parse_row
from prime_hpc.envs.killable import KillablePool, Killed
from prime_hpc.envs.kuhn_poker.game import MOVES, blunders, forfeit, payoff
from prime_hpc.envs.proposer_solver.sums import value_of
from prime_hpc.envs.rollouts import conversation
from prime_hpc.envs.wiki_search.corpus import Corpus
from prime_hpc.envs.wordle.taskset import guess_of
from prime_hpc.envs.wordle.words import WORDS, marks
from prime_hpc.observe.selection import to_row
from tests.chat_server import Reply, play


def episode(name: str, reply: Reply, index: int = 0, **args: object) -> vf.Episode:
    played = asyncio.run(play(SourceConfig(id=f"prime_hpc.envs.{name}", args=args), reply, index))
    assert played.ok, played.errors or played.traces[0].errors
    return played


def test_names_are_sorted_turn_by_turn() -> None:
    def reply(messages: list[dict]) -> str:
        said = [m["content"] for m in messages if m["role"] == "user"]
        names = sorted(name for text in said for name in text.split(",")) if len(said) < 3 else ["no", "idea"]
        return ",".join(names)

    [trace] = episode("alphabet_sort", reply, opening="{names}", further="{names}", separator=",").traces
    assert trace.num_turns == 3
    assert trace.reward == pytest.approx(2 / 3)
    assert trace.metrics["last_exact"] == 0.0


def test_marks_count_each_letter_once() -> None:
    assert [marks(guess, "level") for guess in ("level", "lever", "eagle", "hello", "civic")] == [
        "GGGGG", "GGGGX", "YXXYY", "XGYYX", "XXGXX",
    ]  # fmt: skip
    assert {len(word) for word in WORDS} == {5} and len(set(WORDS)) == len(WORDS)
    assert [guess_of(text, 5) for text in ("I say <Crane> or <house>", "CRANE", "cranes", "")] == [
        "house", "crane", None, None,
    ]  # fmt: skip


def test_a_word_is_found_by_what_is_said_about_guesses() -> None:
    def reply(messages: list[dict]) -> str:
        left = list(WORDS)
        for guess, said in zip(messages[1::2], messages[2::2], strict=False):
            left = [word for word in left if marks(guess["content"][1:-1], word) == said["content"]]
        return f"<{left[0]}>"

    [trace] = episode("wordle", reply, 3).traces
    assert trace.metrics["found"] == 1.0 and trace.reward == 1.0 - 0.1 * (trace.num_turns - 1)
    [trace] = episode("wordle", lambda _: "hm", 3, guesses=2).traces
    assert (trace.num_turns, trace.reward) == (2, 0.0)


def test_payoffs_of_every_game_of_kuhn_poker() -> None:
    games: dict[str, int] = {}

    def go_on(history: list[str]) -> None:
        for move in MOVES.get(" ".join(history), ()):
            go_on([*history, move])
        if " ".join(history) not in MOVES:
            games[" ".join(history)] = payoff((2, 0), history)

    go_on([])
    assert games == {"check check": 1, "check bet call": 2, "check bet fold": -1, "bet call": 2, "bet fold": 1}
    assert (forfeit(0), forfeit(1)) == (-3, 3), "more than any game loses"


def test_blunders_are_sure_losses_and_moves_that_are_not_open() -> None:
    jack, queen, king = 0, 1, 2
    assert blunders(jack, 1, ["bet", "call"]) == blunders(king, 1, ["bet", "fold"]) == {"illegal": 0, "blunder": 1}
    assert blunders(jack, 0, ["check", "bet", "fold"]) == {"illegal": 0, "blunder": 0}
    assert blunders(queen, 1, ["bet", "fold"]) == blunders(king, 0, ["bet", "fold"]) == {"illegal": 0}
    assert blunders(king, 1, ["bet", "check"]) == {"illegal": 1}
    assert blunders(king, 1, ["raise"]) == {}


def test_both_seats_of_kuhn_poker_are_the_policy_and_their_rewards_cancel() -> None:
    def reply(messages: list[dict]) -> str:
        said = messages[-1]["content"]
        return "Bet." if "bet" in said.rpartition(":")[2] else "call" if "the king" in said else "fold"

    played = [episode("kuhn_poker", reply, i, seed=1) for i in range(3)]
    for game in played:
        rewards = {trace.agent.name: trace.reward for trace in game.traces}
        first, second = game.task.data.cards
        assert rewards["first"] == -rewards["second"]
        assert rewards["first"] == (-1.0 if second == 2 else 0.5)
        assert all(trace.num_turns == 1 for trace in game.traces)
    [first, second] = sorted(episode("kuhn_poker", lambda _: "raise").traces, key=lambda t: t.agent.name)
    assert (first.reward, second.reward, second.num_turns) == (-1.5, 1.5, 0)


def test_questions_are_answered_by_searching_and_reading() -> None:
    corpus = Corpus(20, 0)

    def reply(messages: list[dict]) -> str | dict:
        river = next((c.river for c in corpus.countries if c.river in messages[0]["content"]), None)
        answers = [m["content"] for m in messages if m["role"] == "tool"]
        steps = [("search_pages", f'{{"query": "{river}"}}'), ("read_page", f'{{"title": "{river}"}}'),
                 ("read_page", '{"name": 1}'), ("fly", "{}")]  # fmt: skip
        if river is None or len(answers) == len(steps):
            return answers[-1] if river is None and answers else _capital(corpus, answers)
        name, arguments = steps[len(answers)]
        call = {"id": str(len(answers)), "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    index = next(i for i in range(60) if "crosses" in _question(i))
    played = episode("wiki_search", reply, index, countries=20)
    [trace] = played.traces
    assert trace.reward == 1.0 and trace.metrics["calls"] == 4.0
    told = [m.content for m in trace.messages if m.role == "tool"]
    assert told[2:] == ["error: read_page takes title", "error: there is no tool 'fly'"]

    record = {name: json.loads(text) for name, text in conversation(played, trace.agent.config.model).items()}
    record |= {"seats": [], "reward": 1.0, "source": "s", "task_id": "t", "step": 1, "rollout_id": "r"}
    row = parse_row(to_row(record), "rows:1", "trainer.sft.data")
    assert [tool["function"]["name"] for tool in row.tools] == ["search_pages", "read_page"]
    assert row.tools[1]["function"]["parameters"]["properties"] == {"title": {"type": "string"}}
    calls = [m["tool_calls"][0]["function"] for m in row.messages if m.get("tool_calls")]
    assert calls[2:] == [{"name": "read_page", "arguments": {"name": 1}}, {"name": "fly", "arguments": {}}]
    assert [m["content"] for m in row.messages if m["role"] == "tool"] == told, "as rows for SFT have them"


def _question(index: int) -> str:
    from prime_hpc.envs.wiki_search.taskset import WikiSearchConfig, WikiSearchTaskset

    return next(islice(WikiSearchTaskset(WikiSearchConfig(countries=20)), index, None)).data.prompt


def _capital(corpus: Corpus, answers: list[str]) -> str:
    return next(c.capital for c in corpus.countries if answers and f"crosses {c.name} " in answers[1])


def test_sums_are_whole_numbers_and_three_signs() -> None:
    texts = ["2*(3+4)-1", "-7", "1/2", "2**9", "__import__('os')", "9" * 30, "", "True"]
    assert [value_of(text) for text in texts] == [13, -7, None, None, None, None, None, None]


def test_a_proposer_gains_from_what_is_neither_easy_nor_hopeless() -> None:
    tries = iter(["1", "2", "1", "2"])

    def reply(messages: list[dict]) -> str:
        said = messages[0]["content"]
        if said.startswith("hold "):
            return f"{said.removeprefix('hold ')} - {int(said.removeprefix('hold ')) - 1}"
        return next(tries)

    played = episode("proposer_solver", reply, propose="hold {number}")
    rewards = sorted((trace.agent.name, trace.reward) for trace in played.traces)
    assert rewards == [("proposer", 1.0), *(("solver", r) for r in (0.0, 0.0, 1.0, 1.0))]
    [proposal] = episode("proposer_solver", lambda _: "two apples").traces
    assert proposal.reward == 0.0


def test_a_solver_is_given_sums_to_be_measured_alone() -> None:
    def reply(messages: list[dict]) -> str:
        return str(value_of(messages[0]["content"]))

    traces = episode("proposer_solver", reply, given=True, largest=9, solve="{sum}").traces
    assert [(trace.agent.name, trace.reward) for trace in traces] == [("solver", 1.0)] * 4
    [text] = {trace.messages[0].content for trace in traces}
    assert re.fullmatch("[1-9][+-][1-9]", text)


def test_mathematics_is_checked() -> None:
    pytest.importorskip("math_verify")
    for reply, reward in (("x = \\boxed{1}", 0.0), ("so x = \\boxed{-6/2}", 1.0)):
        [trace] = episode("math", lambda _, said=reply: said, seed=1, largest=5, num_tasks=1).traces
        assert trace.task.data.answer == "\\frac{-3}{1}" and trace.reward == reward


def test_a_function_that_hangs_raises_or_dies_is_killed_and_the_next_call_goes_on() -> None:
    async def scenario() -> None:
        sleep, exit_ = KillablePool("time.sleep"), KillablePool("os._exit")
        with pytest.raises(Killed, match="time.sleep was not over after 0.2 s and was killed"):
            await sleep.call([60], 0.2)
        assert await sleep.call([0], 30) is None
        with pytest.raises(Killed, match="time.sleep raised TypeError"):
            await sleep.call(["long"], 30)
        assert await sleep.call([0], 30) is None
        with pytest.raises(Killed, match="the process of os._exit died"):
            await exit_.call([3], 30)

    asyncio.run(scenario())

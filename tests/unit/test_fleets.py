"""Fleets that outlive runs: who may use their engines, what a run checks before that, what its plan leaves out."""

import asyncio
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from omegaconf import OmegaConf

from prime_hpc.cluster import secrets
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import Role
from prime_hpc.commands import chat, status
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.errors import ConfigurationError, EngineInUse, InferenceFailure
from prime_hpc.inference.claims import Claims
from prime_hpc.inference.protocol import ClaimRequest
from prime_hpc.launchers import credentials
from prime_hpc.launchers.claims import give_back
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.models.fingerprint import fingerprint
from prime_hpc.orchestrator import attached
from prime_hpc.orchestrator.attached import Attachment
from prime_hpc.orchestrator.directory import ServedEngines
from prime_hpc.orchestrator.fleet import Engine
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.units import units
from tests.unit.run_dirs import START, RunDir

ATTACH = "inference.attach.run=/shared/fleet"


def make_config(*arguments: str) -> RunConfig:
    source = "env.train=[{id: prime_hpc.envs.reverse_text}]"
    return parse(OmegaConf.to_container(OmegaConf.from_dotlist([source, *arguments])))


def problems(*arguments: str) -> dict[str, str]:
    wrong = find_conflicts(make_config("orchestrator.batch_size=16", "orchestrator.group_size=4", *arguments))
    return {problem.key: problem.expected for problem in wrong if problem.key != "model.path"}


def test_many_may_read_and_one_may_write() -> None:
    now = [0.0]
    claims = Claims(lambda: now[0])
    claims.take(ClaimRequest(holder="eval-1", seconds=10))
    claims.take(ClaimRequest(holder="eval-2", seconds=20))
    with pytest.raises(EngineInUse, match="eval-1 uses this engine: wait") as held:
        claims.take(ClaimRequest(holder="rl", seconds=10, exclusive=True))
    assert (held.value.holder, held.value.seconds) == ("eval-1", 10)
    now[0] = 11.0
    with pytest.raises(EngineInUse, match="eval-2"):
        claims.check("rl")
    claims.take(ClaimRequest(holder="eval-2", seconds=0))
    claims.take(ClaimRequest(holder="rl", seconds=10, exclusive=True))
    claims.check("rl")
    for holder in ("eval-1", "another"):
        with pytest.raises(EngineInUse, match="rl uses this engine"):
            claims.take(ClaimRequest(holder=holder, seconds=10))
    with pytest.raises(EngineInUse):
        claims.check("another")
    now[0] = 22.0
    claims.take(ClaimRequest(holder="another", seconds=10, exclusive=True))


def test_a_fingerprint_tells_models_apart_and_knows_a_copy(tiny_model: Path, tmp_path: Path) -> None:
    weights, config = (tiny_model / name for name in ("model.safetensors", "config.json"))
    for name, last in (("copy", weights.read_bytes()[-1:]), ("other", b"\x7f")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(config.read_bytes())
        (tmp_path / name / weights.name).write_bytes(weights.read_bytes()[:-1] + last)
    assert fingerprint(tmp_path / "copy") == fingerprint(tiny_model) != fingerprint(tmp_path / "other")


def make_role(config: RunConfig) -> SimpleNamespace:
    heart = SimpleNamespace(waiting=lambda what, owner, deadline_s: nullcontext())
    return SimpleNamespace(config=config, paths=SimpleNamespace(root=Path("/runs/mine")), heart=heart,
                           log=logging.getLogger("mine"))  # fmt: skip


def held_by(holder: str | Path, seconds: float) -> httpx.Response:
    return httpx.Response(409, json={"error": f"{holder} uses it", "holder": str(holder), "seconds": seconds})


def attach(
    model: Path, replies: list[httpx.Response], *arguments: str, engines: int | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """What is wrong with engines, one a reply by default, that answer a claim so, and every claim they were sent."""
    config, claims = make_config(f"model.path={model}", "seq_len=64", ATTACH, *arguments), []
    answers = iter(replies)

    def answer(request: httpx.Request) -> httpx.Response:
        claims.append(httpx.Response(200, content=request.content).json())
        return next(answers) if claims[-1]["seconds"] else httpx.Response(200, json={})

    async def check() -> list[str]:
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        attachment = Attachment(make_role(config), http)
        try:
            await attachment.claim([Engine(f"inference-{i}", f"http://e{i}") for i in range(engines or len(replies))])
        except ConfigurationError as error:
            return [str(problem) for problem in error.problems]
        return []

    return asyncio.run(check()), claims


def engine_state(directory: Path, **facts: Any) -> httpx.Response:
    usual = {"fingerprint": fingerprint(directory), "model": "policy", "max_model_len": 64, "version": "0.0"}
    return httpx.Response(200, json=usual | facts)


def attach_one(model: Path, replies: list[httpx.Response]) -> tuple[list[str], int]:
    """What is wrong with an engine that answers claims so, one after the other, and how many it took."""
    wrong, claims = attach(model, replies, engines=1)
    return wrong, sum(claim["seconds"] > 0 for claim in claims)


@pytest.mark.parametrize(("arguments", "exclusive"), [([], True), (["mode=sample"], False)])
def test_engines_that_fit_are_claimed(tiny_model: Path, arguments: list[str], exclusive: bool) -> None:
    wrong, claims = attach(tiny_model, [engine_state(tiny_model)] * 2, *arguments)
    assert (wrong, [claim["exclusive"] for claim in claims]) == ([], [exclusive] * 2)
    assert {claim["holder"] for claim in claims} == {"/runs/mine"}


def test_a_claim_that_nobody_renews_is_waited_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "POLL_S", 0.0)
    ended, alive = RunDir(tmp_path / "ended"), RunDir(tmp_path / "alive")
    ended.event("interrupted", at=1)
    alive.lease(at=time.time() - START)
    lapsing = [held_by(ended.paths.root, seconds) for seconds in (46, 1)]
    assert attach_one(tiny_model, [*lapsing, engine_state(tiny_model)]) == ([], 3)
    assert attach_one(tiny_model, [held_by("out of sight", 46), engine_state(tiny_model)]) == ([], 2)
    (problem,), asked = attach_one(tiny_model, [held_by("out of sight", seconds) for seconds in (46, 60)])
    assert problem.endswith("an engine that is free; out of sight uses it") and asked == 2, "it was renewed"
    (problem,), asked = attach_one(tiny_model, [held_by(alive.paths.root, 46)])
    assert problem.endswith(f"an engine that is free; {alive.paths.root} uses it") and asked == 1


def test_a_fleet_that_has_ended_is_named_with_how_to_start_it(tmp_path: Path) -> None:
    fleet = RunDir(tmp_path / "fleet")
    fleet.configure(mode="serve")
    role = SimpleNamespace(process=SimpleNamespace(name="orchestrator-0"))
    engines = ServedEngines(role, fleet.paths.root)
    fleet.record("inference-0", "ready", at=1, base_url="http://e0")
    assert engines.wait(0) == {"inference-0": "http://e0"}
    fleet.event("interrupted", at=5, reason="ada asked")
    again = f"python -m prime_hpc.resume {fleet.paths.root}"
    with pytest.raises(ConfigurationError, match=f"this one has ended; to start it again .*: {again}"):
        engines.wait(0)
    config = make_config(f"inference.attach.run={fleet.paths.root}", f"run.output_dir={tmp_path}", "run.name=mine")
    with pytest.raises(ConfigurationError, match="this one has ended"):
        RunStart.resolve(config, experiment=None, origins=[])
    assert not (tmp_path / "mine").exists(), "the name is not used up"


def test_who_calls_a_model_hears_which_engine_is_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = RunDir(tmp_path / "fleet")
    fleet.lease(at=time.time() - START)
    fleet.record("inference-0", "starting", at=1)
    for command in (chat.main, lambda arguments: status.main([*arguments, "--endpoint"])):
        assert command([str(fleet.paths.root)]) == 2
        assert capsys.readouterr().err.endswith("fleet is ready: inference-0 is starting\n")
    fleet.record("inference-0", "ready", at=1, base_url="http://e0")
    assert status.main([str(fleet.paths.root), "--endpoint"]) == 0
    token = secrets.token_file(fleet.paths.root)
    assert capsys.readouterr().out == f"inference-0  http://e0/v1\nmodel        policy\ntoken        {token}\n"
    fleet.event("interrupted", at=2, reason="ada asked")
    assert chat.main([str(fleet.paths.root)]) == 2
    assert "fleet is not at work; to start it again" in capsys.readouterr().err


@pytest.mark.parametrize("body", ['{"error": "no engine"}', '{"error": {"message": "no engine"}}', "no engine"])
def test_an_answer_of_a_server_is_told_by_its_reason(body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(503, text=body))
    with pytest.raises(InferenceFailure, match="answered 503: no engine$"):
        chat.ask_model(httpx.Client(base_url="http://e0", transport=transport))


def test_a_launcher_gives_the_claim_of_its_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, mine, told = RunDir(tmp_path / "fleet"), RunPaths(tmp_path / "mine"), []
    fleet.record("inference-0", "ready", at=1, base_url="http://e0")
    monkeypatch.setattr(httpx, "post", lambda url, **request: told.append((url, request["json"], request["headers"])))
    secrets.create(fleet.paths.root, "secret")
    config = make_config(f"inference.attach.run={fleet.paths.root}")
    credentials.provide(config, mine.root)
    give_back(config, mine)
    body = {"holder": str(mine.root), "seconds": 0.0}
    assert told == [("http://e0/prime_hpc/claim", body, {"Authorization": "Bearer secret"})]
    give_back(make_config(), mine)
    give_back(make_config(f"inference.attach.run={tmp_path / 'removed'}"), mine)
    assert len(told) == 1


def test_an_engine_that_refuses_to_renew_a_claim_is_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached, "RENEW_S", 0.0)
    replies = iter([engine_state(tiny_model)])
    role = make_role(make_config(f"model.path={tiny_model}", "seq_len=64", ATTACH))

    async def keep() -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: next(replies, httpx.Response(409, text="b"))))
        await Attachment(role, http).claim([Engine("inference-0", "http://e0")])
        async with asyncio.timeout(30):
            while not caplog.messages:
                await asyncio.sleep(0.01)

    asyncio.run(keep())
    assert caplog.messages[0] == "inference-0 does not take this run's claim: b"


def test_a_run_that_trains_takes_engines_of_any_version_and_one_that_does_not_only_the_expected_one(
    tiny_model: Path,
) -> None:
    served = engine_state(tiny_model, version="0.7")
    assert attach(tiny_model, [served])[0] == []
    assert attach(tiny_model, [served], "mode=sample")[0] == [
        "inference.attach.version = '0.0': expected 0.7, which inference-0 at http://e0 serves; or a new fleet"
    ]
    assert attach(tiny_model, [served], "mode=sample", "inference.attach.version=0.7")[0] == []


@pytest.mark.parametrize(("reply", "said"), [
    (httpx.Response(401), "inference.attach = 'inference-0 at http://e0': expected the token of these engines"),
    (held_by("/runs/b", 61), "expected an engine that is free; /runs/b uses it"),
    (httpx.Response(404), "expected an engine of this product; it answered 404"),
    ({"fingerprint": "00"}, "expected an engine that was started with the model in"),
    ({"model": "judge"}, "model.served_name = 'policy': expected judge, as inference-0"),
    ({"max_model_len": 32}, "seq_len = 64: expected at most 32, as inference-0"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line_and_the_claim_is_given_back(
    tiny_model: Path, reply: httpx.Response | dict[str, Any], said: str
) -> None:
    first = engine_state(tiny_model, **reply) if isinstance(reply, dict) else reply
    (problem,), claims = attach(tiny_model, [first, engine_state(tiny_model)])
    assert said in problem and "\n" not in problem
    assert [claim["seconds"] for claim in claims] == [60.0, 60.0, 0.0, 0.0]


def test_the_plan_of_an_attached_run_has_no_engines_of_the_policy() -> None:
    frozen = "frozen.judge.path=/models/judge"
    for launcher in ("local", "slurm_hetjob", "slurm_linked"):
        gpus = ["cluster.gpus_per_node=4", "trainer.ranks=4"] if launcher != "local" else []
        alone = build_plan(make_config(ATTACH, f"launcher.name={launcher}", *gpus), Path("/r"), Attempt(), gpus=0)
        assert {p.component for p in alone.processes} == {"orchestrator", "environment", "trainer"}
        assert "inference" not in {group.name for group in alone.groups}
    judged = build_plan(make_config(ATTACH, frozen), Path("/r"), Attempt(), gpus=0)
    assert [(p.name, p.frozen) for p in judged.of("inference")] == [("inference-0", "judge")]


def test_a_router_is_a_unit_beside_the_first_engine() -> None:
    arguments = ["mode=serve", "inference.router=builtin", "inference.replicas=3", "cluster.gpus_per_node=2"]
    plan = build_plan(make_config(*arguments, "launcher.name=slurm_hetjob"), Path("/r"), Attempt(), gpus=0)
    router = plan.process("router-0")
    assert (plan.group(router).name, router.node, router.gpus) == ("inference", 0, [])
    assert router.command[2] == "prime_hpc.inference.router"
    assert [unit.name for unit in units(plan)] == ["inference-0", "inference-1", "inference-2", "router"]


def test_conflicts_of_fleets(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    urls = "inference.attach.urls=[http://e0:1]"
    assert problems("inference.router=builtin")["inference.router"].startswith("none, except with mode=serve")
    assert problems(ATTACH) == {
        "inference.attach.run": "the directory of a run with mode=serve (+experiment=serve)"}  # fmt: skip
    assert problems(ATTACH, urls) == {"inference.attach": "either run or urls"}
    assert problems(urls) == {"inference.attach.token_file": "an existing file with the token of the engines"}
    assert problems(urls, f"inference.attach.token_file={token}") == {}
    assert "update.transport" in problems(urls, f"inference.attach.token_file={token}", "update.transport=nccl")
    assert problems("mode=serve", ATTACH)["inference.attach"].startswith("to be left out with mode=serve")


def test_a_fleet_keeps_its_token_and_who_attaches_has_the_same(tmp_path: Path) -> None:
    serve, fleet, mine = make_config("mode=serve"), tmp_path / "fleet", tmp_path / "mine"
    attached = make_config(f"inference.attach.run={fleet}")
    with pytest.raises(ConfigurationError, match="the token of a fleet that was started by this user"):
        credentials.provide(attached, mine)
    for _ in range(2):
        credentials.provide(serve, fleet)
        token = secrets.load(fleet).token
        credentials.discard(serve, fleet)
    credentials.provide(attached, mine)
    assert secrets.load(fleet).token == secrets.load(mine).token == token
    assert secrets.load(fleet).curve_secret != secrets.load(mine).curve_secret
    credentials.discard(attached, mine)
    assert not secrets.secrets_dir(mine).exists() and secrets.token_file(fleet).exists()


@pytest.mark.parametrize(("launcher", "mode", "host"), [
    ("local", "serve", "127.0.0.1"),
    ("slurm_hetjob", "serve", "0.0.0.0"),
    ("slurm_single", "rl", "127.0.0.1"),
])  # fmt: skip
def test_a_fleet_on_one_node_of_slurm_is_reached_from_others(
    tmp_path: Path, launcher: str, mode: str, host: str
) -> None:
    config = make_config(f"mode={mode}", f"launcher.name={launcher}", "cluster.gpus_per_node=2", "trainer.ranks=1")
    plan = build_plan(config, tmp_path, Attempt(), gpus=0)
    credentials.provide(config, tmp_path)
    role = Role(plan, plan.process("inference-0"))
    assert (plan.nodes, role.bind_host) == (1, host)
    assert (role.advertised_host == "127.0.0.1") == (host == "127.0.0.1")

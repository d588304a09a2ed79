"""Bad configuration and bad input: one clear error each, nothing started and nothing written."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import DATA, read_first
from prime_hpc.errors import ConfigurationError, CorruptData, EnvironmentFailure, SchemaMismatch
from prime_hpc.plan import run_plan
from prime_hpc.transport import checkpoints, weights
from prime_hpc.transport.messages import SCHEMA_VERSION, CancelRollout, PolicyVersion, decode, encode

ROOT = Path(__file__).parents[2]
CHECKPOINT_STEP = 20
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m prime_hpc.launch` from `folder`, whose `outputs` gets the runs."""
    command = [sys.executable, "-m", "prime_hpc.launch", "run.output_dir=outputs", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=300)  # fmt: skip


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def refused(folder: Path, *arguments: str) -> list[str]:
    """The problems of a refused configuration, a line each; `folder` is left as it was."""
    before = files(folder)
    done = launch(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert files(folder) == before
    title, *lines = done.stderr.splitlines()
    problems = [line for line in lines if line.startswith("  ")]
    assert title == f"{len(problems)} problem{'s' * (len(problems) != 1)} in the configuration:"
    return [line.strip() for line in problems]


CASES = {
    "choices": (
        ["+experiment=reverse_txt", "launcher=locall", "loss=defalt", "model=qwen", "inference=vllm"],
        [
            f"experiment = 'reverse_txt': expected one of {', '.join(EXPERIMENTS)}; did you mean 'reverse_text'?",
            "launcher = 'locall': expected one of dry_run, local, slurm_hetjob, slurm_linked, slurm_single; "
            "did you mean 'local'?",
            "loss = 'defalt': expected one of aipo, cispo, custom, dapo, default, dr_grpo, grpo, gspo, icepop, ipo, "
            "mis, ppo, tis; did you mean 'default'?",
            "model = 'qwen': expected one of qwen3_0.6b, qwen3_1.7b, qwen3_moe_3b; did you mean 'qwen3_0.6b'?",
            "inference = 'vllm': expected inference.KEY=VALUE, since this group has no files",
        ],
    ),
    "schema": (
        ["orchestrator.batch_sise=3", "loss.name=defalt", "max_steps=0", "seq_len=long", "optimizer.lr=-1"],
        [
            "max_steps = 0: expected at least 1",
            "seq_len = 'long': expected a whole number",
            "loss.name = 'defalt': expected one of default, ipo, ppo, gspo, importance, custom; did you mean "
            "'default'?",
            "optimizer.lr = -1: expected at least 0.0",
            "orchestrator.batch_sise = 3: expected no such key; known here: batch_size, group_size, max_staleness, "
            "on_stale, age_discount, partial_groups, max_lead, max_inflight, drop_zero_advantage, max_empty_batches, "
            "transport, progress_every_s; did you mean 'batch_size'?",
        ],
    ),
    "conflicts": (
        ["seq_len=512", "orchestrator.group_size=1", "inference.vllm.port=8000", "inference.vllm.host=0.0.0.0",
         "env.train.0.id=prime_hpc.envs.revers_text"],
        [
            "seq_len = 512: expected at most 256, the limit of MODEL",
            "orchestrator.group_size = 1: expected at least 2: algorithm=grpo compares a group",
            "inference.vllm.host = '0.0.0.0': expected to be left out: an engine listens where the system has a free "
            "port",
            "inference.vllm.port = 8000: expected to be left out: an engine listens where the system has a free port",
            "env.train.0.id = 'prime_hpc.envs.revers_text': expected an installed module of a verifiers taskset; "
            "bundled are prime_hpc.envs.alphabet_sort, prime_hpc.envs.bug_fix, prime_hpc.envs.colour_row, "
            "prime_hpc.envs.kuhn_poker, prime_hpc.envs.math, prime_hpc.envs.proposer_solver, "
            "prime_hpc.envs.reverse_text, prime_hpc.envs.wiki_search, prime_hpc.envs.wordle, harbor, nemo_gym, "
            "openenv, textarena; "
            "did you mean 'prime_hpc.envs.reverse_text'?",
        ],
    ),
    "absent model": (
        ["model.path=absent", "orchestrator.batch_size=12"],
        [
            "model.path = 'absent': expected an existing directory in Hugging Face layout",
            "orchestrator.batch_size = 12: expected a multiple of orchestrator.group_size = 8",
        ],
    ),
    "dangling reference": (
        ["model.path=${model.pth}"],
        ["model.path = '${...}': expected a reference that resolves (Interpolation key 'model.pth' not found)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_mistake_is_named_at_once(case: str, tmp_path: Path, tiny_model: Path) -> None:
    arguments, problems = CASES[case]
    base = [f"model.path={tiny_model}", "launcher=local", "+experiment=reverse_text_cpu"]
    replaced = {a.partition("=")[0].lstrip("+") for a in arguments}
    base = [a for a in base if a.partition("=")[0].lstrip("+") not in replaced]
    assert refused(tmp_path, *base, *arguments) == [p.replace("MODEL", str(tiny_model)) for p in problems]


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = tmp_path / "plain"
    shutil.copytree(tiny_model, tokenizer)
    (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    config = RunConfig(seq_len=64, model=ModelConfig(path=str(tiny_model), tokenizer=str(tokenizer)))
    assert [str(p) for p in find_conflicts(config) if p.key.startswith("model")] == [
        f"model.tokenizer = '{tokenizer}': expected a tokenizer with a chat template (chat_template.jinja)"
    ]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xee\x00\x01"])
def test_a_model_whose_config_is_damaged_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    config = RunConfig(model=ModelConfig(path=str(tmp_path)))
    assert [str(p) for p in find_conflicts(config) if p.key == "model.path"] == [
        f"model.path = '{tmp_path}': expected a directory with a readable config.json"
    ]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "outputs").touch()
    assert refused(tmp_path, "+experiment=reverse_text_cpu", f"model.path={tiny_model}") == [
        f"run.output_dir = 'outputs': expected a folder that this user may write to; {tmp_path / 'outputs'} is not"
    ]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the run `outputs/mine`: one attempt, and a checkpoint that has its configuration."""
    folder = tmp_path_factory.mktemp("finished")
    done = launch(folder, *mine(Path(os.path.relpath(tiny_model, folder))), "launcher=dry_run")
    assert done.returncode == 0, done.stderr
    run = folder / "outputs" / "mine"
    (run / "logs" / "attempt_1").mkdir(parents=True)
    partial = checkpoints.partial_path(run / "checkpoints", CHECKPOINT_STEP)
    partial.mkdir(parents=True)
    (partial / "shard.bin").write_bytes(b"optimiser")
    checkpoints.publish(partial, checkpoints.CheckpointManifest(
        step=CHECKPOINT_STEP, lineage=0, world=2, journal_offset=0, config=run_plan.load(run / "plan.json").config,
        files={"shard.bin": checkpoints.describe(partial / "shard.bin")}))  # fmt: skip
    return folder


def mine(model: Path) -> list[str]:
    return ["+experiment=reverse_text_cpu", f"model.path={model}", "run.name=mine"]


def test_the_name_of_a_run_that_exists_is_refused(finished_run: Path, tiny_model: Path) -> None:
    assert refused(finished_run, *mine(tiny_model)) == [
        "run.name = 'mine': expected a new name, since this run exists; resume=latest goes on with it"
    ]


def test_the_name_of_a_run_without_a_checkpoint_leads_to_its_start(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "outputs" / "mine" / "logs" / "attempt_1").mkdir(parents=True)
    (problem,) = refused(tmp_path, *mine(tiny_model))
    assert problem.endswith("since this run exists; resume=auto starts it again, as it has no checkpoint")


def test_a_relative_path_is_absolute_in_the_run(finished_run: Path, tiny_model: Path) -> None:
    plan = run_plan.load(finished_run / "outputs" / "mine" / "plan.json")
    assert plan.config["model"]["path"] == str(tiny_model)


def test_a_resume_without_a_checkpoint_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    assert refused(tmp_path, *mine(tiny_model), "resume=latest") == [
        "resume = 'latest': expected a complete checkpoint, and there is none in "
        f"{tmp_path}/outputs/mine/checkpoints; resume=auto starts anew then"
    ]


def test_changed_keys_are_refused_on_resume(finished_run: Path, tiny_model: Path) -> None:
    changes = ["optimizer.lr=0.1", "seq_len=128", "max_steps=99", "env.workers=1"]
    lr, seq_len = refused(finished_run, *mine(tiny_model), "resume=latest", *changes)
    assert lr == "optimizer.lr = 0.1: expected 6e-05 as in the checkpoint"
    assert seq_len == "seq_len = 128: expected 64 as in the checkpoint"


def test_what_may_change_on_resume_is_said_once(finished_run: Path, tiny_model: Path) -> None:
    done = launch(finished_run, *mine(tiny_model), "resume=latest", "optimizer.lr=0.1", "seq_len=128")
    assert done.stderr.count("a resumed run may change only max_steps, resume, run, ") == 1


def test_a_damaged_checkpoint_is_not_resumed(finished_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "outputs", tmp_path / "outputs")
    shard = tmp_path / "outputs/mine/checkpoints" / f"step_{CHECKPOINT_STEP}" / "shard.bin"
    shard.write_bytes(b"optimizer")
    before = files(tmp_path)
    done = launch(tmp_path, *mine(tiny_model), "resume=latest")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"CorruptData: {shard} does not match its digest: the file was changed or damaged; "
                           "resume from another checkpoint\n")  # fmt: skip
    assert files(tmp_path) == before


# A disk that is full when a checkpoint is saved: tests/integration/test_trainer_run.py.


def test_an_environment_that_raises_names_source_and_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_hpc.envs.environment import Environment  # here and not above: verifiers takes seconds to load

    (tmp_path / "words_that_fail.py").write_text("raise RuntimeError('the word list is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFailure) as caught:
        Environment("words", SourceConfig(id="words_that_fail"), ModelConfig())
    assert str(caught.value) == ("source 'words': environment 'words_that_fail' does not load: "
                                 "RuntimeError: the word list is missing")  # fmt: skip


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    from prime_hpc.envs.environment import Environment

    model = ModelConfig(path=str(tmp_path))
    environment = Environment("words", SourceConfig(id="prime_hpc.envs.reverse_text"), model)
    with pytest.raises(EnvironmentFailure) as caught:
        asyncio.run(environment.load_renderer())
    assert str(caught.value).startswith(f"renderer 'default' does not load for {tmp_path}: ")
    assert str(caught.value).endswith("; set model.renderer, its options or model.tokenizer")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A sealed version of weights with one file of 6 bytes."""
    (tmp_path / "model.safetensors").write_bytes(b"weight")
    weights.seal(tmp_path, PolicyVersion(0, 3), "float32")
    assert weights.verify(tmp_path).version == "0.3"
    return tmp_path


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"weigh", "has 5 bytes, its manifest says 6: the file is missing or cut"),
        (b"Weight", "does not match its digest: the file was changed or damaged"),
        (None, "has None bytes, its manifest says 6: the file is missing or cut"),
    ],
)
def test_a_damaged_weights_file_is_named(version: Path, content: bytes | None, expected: str) -> None:
    path = version / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CorruptData) as caught:
        weights.verify(version)
    assert str(caught.value) == f"{path} {expected}"


def test_a_manifest_of_weights_that_contradicts_itself_is_refused(version: Path) -> None:
    path = version / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=weights.WeightsManifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, digest="0" * 64)))
    with pytest.raises(CorruptData) as caught:
        weights.verify(version)
    assert str(caught.value) == f"{path} contradicts itself: its digest is not that of its list of files"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": %d}' % weights.MANIFEST_SCHEMA])
def test_a_manifest_of_weights_that_cannot_be_read_is_refused(version: Path, content: bytes) -> None:
    (version / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptData, match=f"^{version} has no readable manifest: "):
        weights.verify(version)


def test_a_message_of_another_schema_version_is_refused() -> None:
    _, body = encode(CancelRollout(rollout_id="r"))
    with pytest.raises(SchemaMismatch) as caught:
        decode([b"99", body])
    assert str(caught.value) == (f"a peer speaks message schema '99', this process speaks {SCHEMA_VERSION}: "
                                 "start every process of a run from one installation of prime_hpc")  # fmt: skip


def test_a_line_of_sft_data_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": \n')
    with pytest.raises(ConfigurationError) as caught:
        read_first(path, DATA, 100)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trainer.sft.data", f"{path}:2")
    assert problem.expected.startswith("a JSON object a line (Input data was truncated")

"""Policy versions for the engines, and the final model: announced in files, sent as `update.transport` says."""

import json
import shutil
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.model_files import INDEX
from prime_hpc.config.sections import ModelConfig
from prime_hpc.trainer.canary import CanaryScorer
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.lora import make_peft_folder, peft_tensors
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.weights_files import FileWriter, Written, make_directory, save_tensors
from prime_hpc.trainer.weights_sender import StreamSender
from prime_hpc.transport import weights
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import RECEIVERS, Delta, Receiver, WeightsManifest

TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
POLL_S = 0.01


class WeightsWriter:
    """Every rank takes part in every call, since every tensor is gathered from all ranks."""

    def __init__(self, role: Role, world: World, policy: PolicyModel):
        self._role, self._world, self._policy = role, world, policy
        config = role.config
        self._update = config.update
        wanted = config.trainer.publish_dtype
        self._dtype = config.trainer.dtype if wanted == "auto" else wanted
        self._files = FileWriter(policy, world, self._dtype, self._write, remember=self._update.chosen == "delta")
        self._adapters_only = bool(config.lora.served)
        streams = self._update.streams and not self._adapters_only
        self._sender = StreamSender(role, world, policy, self._files) if streams else None
        every = 0 if policy.lora else self._update.canary_every
        self._canary = CanaryScorer(policy, world, config.seq_len, every)
        self._published = 0
        self._base: str | None = None
        self._streamed: tuple[Path, WeightsManifest] | None = None
        """The newest version, if it was only streamed."""

    def publish(self, version: PolicyVersion) -> None:
        """Announce `weights/vL.S` and see to it that engines can have it; then remove versions that nobody needs.

        The first version is always whole; weights are streamed from the second on, and the last is written too, since
        nobody could ask for it any more. Adapters travel whole, in files.
        """
        self._role.reach("update.before")
        final = self._role.paths.weights_version(str(version))
        manifest = WeightsManifest(version=str(version), dtype=self._dtype, canary=self._canary.score())
        if self._adapters_only:
            self._publish_adapters(final, version)
        elif self._sender and self._published:
            self._stream(self._sender, final, manifest, last=version.step == self._role.config.max_steps)
        else:
            due = self._published % self._update.full_every == 0
            self._publish_files(final, manifest, whole=due or self._update.chosen != "delta")
        self._published += 1
        if self._world.first:
            self._clean_up()

    def write_whole(self) -> None:
        """Write the newest version whole, if it was only streamed."""
        if self._streamed:
            final, manifest = self._streamed
            self._role.log.info("writing v%s, which engines ask for", manifest.version)
            self._add_files(final, manifest)

    def export(self) -> None:
        """Write `model/` in the run directory: weights, config and tokenizer, ready for any Hugging Face tool.

        Of adapters write `adapters/`, and `model/` only with a single one, which is merged.
        """
        root, lora = self._role.paths.root, self._policy.lora
        self._files.forget()
        if lora is None or len(lora.adapters) == 1:
            partial = self._begin(root / "model")
            self._files.write(partial, whole=True)
            if self._world.first:
                describe_model(partial, self._role.config.model, self._dtype)
            self._put(partial, root / "model")
        if lora:
            partial = self._begin(root / "adapters")
            self._write_adapters(partial)
            self._put(partial, root / "adapters")

    def _put(self, partial: Path, final: Path) -> None:
        if self._world.first:
            self._role.lease.check()
            weights.publish(partial, final)
        dist.barrier()

    def _publish_adapters(self, final: Path, version: PolicyVersion) -> None:
        partial = self._begin(final)
        self._write_adapters(partial)
        self._role.reach("update.during")
        if self._world.first:
            self._role.lease.check()
            self._role.patience.write(final.name, lambda: weights.seal(partial, version, self._dtype))
            weights.publish(partial, final)

    def _write_adapters(self, directory: Path) -> None:
        """Fill `directory` with a folder for each adapter. They are small, so that rank 0 writes them."""
        config, policy, dtype = self._role.config, self._policy, getattr(torch, self._dtype)
        for adapter in policy.lora.adapters:
            tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous()
                       for name, tensor in peft_tensors(policy.lora, policy.conversion, adapter)}  # fmt: skip
            if self._world.first:
                path = make_peft_folder(directory / adapter, config.lora, config.model.path, policy.conversion)
                self._role.patience.write(path.name, lambda path=path, tensors=tensors: save_tensors(tensors, path))

    def _publish_files(self, final: Path, manifest: WeightsManifest, *, whole: bool) -> None:
        partial = self._begin(final)
        written = self._files.write(partial, whole=whole)
        self._role.reach("update.during")
        if self._world.first:
            self._seal(partial, manifest, written, whole=whole)
            weights.publish(partial, final)
        self._base = manifest.version

    def _stream(self, sender: StreamSender, final: Path, manifest: WeightsManifest, *, last: bool) -> None:
        """Offer the version, send it to whoever is asked for, and write it whole if it is the last or an engine lacks
        it."""
        partial = self._begin(final)
        manifest.stream = sender.offer()
        if self._world.first:
            self._seal(partial, manifest, Written({}, {}), whole=False)
            weights.publish(partial, final)
        receivers = self._await_receivers(final)
        sent = sender.send(manifest.version, receivers) if receivers else None
        manifest.stream, manifest.streamed = None, sent.digest if sent else ""
        self._streamed = final, manifest
        if last or sent is None or sent.lost:
            self._add_files(final, manifest)
        elif self._world.first:
            self._seal(final, manifest, Written({}, {}), whole=False)

    def _add_files(self, final: Path, manifest: WeightsManifest) -> None:
        """Write the files of a version that was streamed."""
        written = self._files.write(final, whole=True)
        if self._world.first:
            self._seal(final, manifest, written, whole=True)
        self._streamed = None

    def _await_receivers(self, final: Path) -> dict[str, Receiver]:
        """The engines that the orchestrator has named, alike on all ranks; none where it does not name them in time."""
        asked: dict[str, Receiver] = {}
        if self._world.first:
            deadline = time.monotonic() + self._update.stall_s
            with self._role.heart.waiting(f"receivers of {final.name}", "orchestrator-0", self._update.stall_s):
                while not (given := read_json(final / RECEIVERS)) and time.monotonic() < deadline:
                    list_fresh(final)
                    time.sleep(POLL_S)
            asked = msgspec.convert(given or {}, dict[str, Receiver])
        return msgspec.convert(gather(msgspec.to_builtins(asked))[0], dict[str, Receiver])

    def _begin(self, final: Path) -> Path:
        """An empty directory beside `final`."""
        partial = final.with_name(f".{final.name}.partial")
        if self._world.first:
            shutil.rmtree(partial, ignore_errors=True)
        make_directory(partial, self._world)
        return partial

    def _seal(self, directory: Path, manifest: WeightsManifest, written: Written, *, whole: bool) -> None:
        self._role.lease.check()
        manifest.files, manifest.whole = written.files, whole
        manifest.delta = Delta(base=self._base, files=written.deltas) if written.deltas and self._base else None
        self._role.patience.write(directory.name, lambda: weights.write_manifest(directory, manifest))

    def _write(self, path: Path, data: memoryview) -> None:
        self._role.patience.write(path.name, lambda: path.write_bytes(data))

    def _clean_up(self) -> None:
        """Delete leftovers and old versions: those before the newest few, before the oldest that an engine still runs,
        and before the newest whole one that deltas lead on from."""
        paths = self._role.paths
        for name in list_fresh(paths.weights):
            if name.startswith(".v"):
                shutil.rmtree(paths.weights / name)
        versions = weights.published_versions(paths.weights)
        acks = [read_json(paths.acks / name) for name in list_fresh(paths.acks)
                if name.endswith(".json") and not name.startswith(".")]  # fmt: skip
        needed = [PolicyVersion.parse(ack["version"]) for ack in acks if ack]
        if self._update.chosen == "delta":
            needed += [v for v in versions if weights.read_manifest(paths.weights_version(str(v))).whole][-1:]
        for version in versions[: -self._update.keep_versions]:
            if version < min(needed, default=versions[-1]):
                path = paths.weights_version(str(version))
                condemned = path.with_name(f".{path.name}.removed")
                path.rename(condemned)
                shutil.rmtree(condemned)


def describe_model(directory: Path, model: ModelConfig, dtype: str) -> None:
    """Put beside weights of `dtype` what else makes a model: config and tokenizer."""
    for source in dict.fromkeys((model.path, model.tokenizer or model.path)):
        for path in Path(source).iterdir():
            if path.suffix in TOKENIZER_SUFFIXES and path.name != INDEX and path.is_file():
                shutil.copyfile(path, directory / path.name)
    config = json.loads((Path(model.path) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))

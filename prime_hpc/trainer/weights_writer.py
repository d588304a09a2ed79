"""Policy versions for the engines, and the final model: announced in files, sent as `update.transport` says."""

import json
import shutil
import time
from pathlib import Path

import msgspec
import torch.distributed as dist

from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.role import Role
from prime_hpc.trainer.canary import CanaryScorer
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.hf_weights import INDEX
from prime_hpc.trainer.model import PolicyModel
from prime_hpc.trainer.weights_files import FileWriter, Written, make_directory
from prime_hpc.trainer.weights_sender import StreamSender
from prime_hpc.transport import weights
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import RECEIVERS, Delta, Receiver, WeightsManifest

TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
POLL_S = 0.01


class WeightsWriter:
    """Every rank takes part in every call, since every tensor is gathered from all ranks."""

    def __init__(self, role: Role, world: World, policy: PolicyModel):
        self._role, self._world = role, world
        config = role.config
        self._update = config.update
        wanted = config.trainer.publish_dtype
        self._dtype = config.trainer.dtype if wanted == "auto" else wanted
        self._files = FileWriter(policy, world, self._dtype, self._write, remember=self._update.chosen == "delta")
        self._sender = StreamSender(role, world, policy, self._files) if self._update.streams else None
        self._canary = CanaryScorer(policy, world, self._update.canary_every)
        self._published = 0
        self._base: str | None = None

    def publish(self, version: PolicyVersion) -> None:
        """Announce `weights/vL.S` and see to it that engines can have it; then remove versions that nobody needs.

        The first version is always whole; weights are streamed from the second on.
        """
        self._role.reach("update.before")
        final = self._role.paths.weights_version(str(version))
        manifest = WeightsManifest(version=str(version), dtype=self._dtype, canary=self._canary.score())
        whole = self._update.chosen == "filesystem" or self._published % self._update.full_every == 0
        if self._sender and self._published:
            self._stream(self._sender, final, manifest, whole=whole)
        else:
            self._publish_files(final, manifest, whole=whole)
        self._published += 1
        if self._world.first:
            self._clean_up()

    def export(self) -> Path:
        """Write `model/` in the run directory: weights, config and tokenizer, ready for any Hugging Face tool."""
        final = self._role.paths.root / "model"
        partial = self._begin(final)
        self._files.forget()
        self._files.write(partial, whole=True)
        if self._world.first:
            self._describe_model(partial)
            self._role.lease.check()
            weights.publish(partial, final)
        dist.barrier()
        return final

    def _publish_files(self, final: Path, manifest: WeightsManifest, *, whole: bool) -> None:
        partial = self._begin(final)
        written = self._files.write(partial, whole=whole)
        self._role.reach("update.during")
        if self._world.first:
            self._seal(partial, manifest, written, whole=whole)
            weights.publish(partial, final)
        self._base = manifest.version

    def _stream(self, sender: StreamSender, final: Path, manifest: WeightsManifest, *, whole: bool) -> None:
        """Offer the version, send it to whoever is asked for, and write it whole if it is due or an engine lacks it."""
        partial = self._begin(final)
        manifest.stream = sender.offer()
        if self._world.first:
            self._seal(partial, manifest, Written({}, {}), whole=False)
            weights.publish(partial, final)
        receivers = self._await_receivers(final)
        sent = sender.send(manifest.version, receivers) if receivers else None
        manifest.stream, manifest.streamed = None, sent.digest if sent else ""
        whole = whole or sent is None or bool(sent.lost)
        written = self._files.write(final, whole=True) if whole else Written({}, {})
        if self._world.first:
            self._seal(final, manifest, written, whole=whole)

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

    def _write(self, path: Path, data: bytes) -> None:
        self._role.patience.write(path.name, lambda: path.write_bytes(data))

    def _describe_model(self, directory: Path) -> None:
        model = self._role.config.model
        for source in dict.fromkeys((model.path, model.tokenizer or model.path)):
            for path in Path(source).iterdir():
                if path.suffix in TOKENIZER_SUFFIXES and path.name != INDEX and path.is_file():
                    shutil.copyfile(path, directory / path.name)
        config = json.loads((Path(model.path) / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "dtype": self._dtype}, indent=2))

    def _clean_up(self) -> None:
        """Delete leftovers and old versions: those before the newest few, before the oldest that an engine still runs,
        and before the newest whole one, from which engines start."""
        paths = self._role.paths
        for name in list_fresh(paths.weights):
            if name.startswith(".v"):
                shutil.rmtree(paths.weights / name)
        versions = weights.published_versions(paths.weights)
        acks = [read_json(paths.acks / name) for name in list_fresh(paths.acks)
                if name.endswith(".json") and not name.startswith(".")]  # fmt: skip
        needed = [PolicyVersion.parse(ack["version"]) for ack in acks if ack]
        needed += [v for v in versions if weights.read_manifest(paths.weights_version(str(v))).whole][-1:]
        for version in versions[: -self._update.keep_versions]:
            if version < min(needed, default=versions[-1]):
                path = paths.weights_version(str(version))
                condemned = path.with_name(f".{path.name}.removed")
                path.rename(condemned)
                shutil.rmtree(condemned)

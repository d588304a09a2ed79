"""From the trainer's shards to the engines without a file: gathered, packed and sent bucket by bucket.

Every rank gathers every bucket, as all of them hold shards of it; an engine gets it from the one rank that has the
engine's link. While a bucket is on its way the next one is gathered, so a rank never holds more than two.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from prime_hpc.cluster.role import Role
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from prime_hpc.trainer.distributed import World, gather, listen
from prime_hpc.trainer.hf_weights import named_weights
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.weights_files import FileWriter, group
from prime_hpc.transport.buckets import Layout, digest, pack, sums_of
from prime_hpc.transport.links import Link, announce, go_key, open_link, ready_key, wait_until
from prime_hpc.transport.weights import Receiver, Stream


class _Peer(NamedTuple):
    """An engine that this rank sends to."""

    receiver: Receiver
    link: Link


class Sent(NamedTuple):
    """Digest of all tensors, and the engines that did not take them."""

    digest: str
    lost: list[str]


class StreamSender:
    """Every rank takes part in every call."""

    def __init__(self, role: Role, world: World, policy: PolicyModel, files: FileWriter):
        self._role, self._world, self._policy, self._files = role, world, policy, files
        update = role.config.update
        self._stall_s, self._ready_s = update.stall_s, update.ready_s
        self._backend = update.chosen if world.device.type == "cuda" else "gloo"
        self._store, address = listen(role, update.timeout_s)
        addresses = gather(address)
        self._mine = {e.name for e in role.plan.engines() if sender_of(role.plan, e) == world.rank}
        self._senders = {e.name: addresses[sender_of(role.plan, e)] for e in role.plan.engines()}
        sizes = {name: t.numel() * files.published_dtype(t).itemsize for name, t in named_weights(policy)}
        self._groups = group(sizes, update.bucket_mib * 2**20)
        self._peers: dict[str, _Peer] = {}

    def offer(self) -> Stream:
        """What engines need to know to take part."""
        tensors = dict(named_weights(self._policy))
        buckets = [[entry for name in names for entry in self._files.entries(name, tensors[name])]
                   for names in self._groups]  # fmt: skip
        return Stream(backend=self._backend, senders=self._senders, ready_s=self._ready_s, stall_s=self._stall_s,
                      buckets=buckets)  # fmt: skip

    def send(self, version: str, receivers: dict[str, Receiver]) -> Sent:
        """Send all tensors to the engines that are ready in time; one that is lost on the way does not stop others."""
        mine = {name: receiver for name, receiver in receivers.items() if name in self._mine}
        self._connect(mine)
        self._start_together(version)
        tensors, sums = dict(named_weights(self._policy)), []
        for i, names in enumerate(self._groups):
            gathered = self._files.gather({name: tensors[name] for name in names})
            if self._peers or self._world.first:
                layout = Layout.of([entry for name in names for entry in self._files.entries(name, tensors[name])])
                bucket = pack(layout, (tensor for _, tensor in gathered), self._world.device)
                sums.append(sums_of(layout, bucket))
                self._each(lambda peer: peer.link.settle())
                self._each(lambda peer, b=bucket: peer.link.post(b))
            else:
                for _ in gathered:
                    pass
            if i == 0:
                self._role.reach("update.during")
        self._each(lambda peer: peer.link.settle())
        lost = [name for part in gather(sorted(mine.keys() - self._peers)) for name in part]
        return Sent(digest(sums), lost)

    def _connect(self, receivers: dict[str, Receiver]) -> None:
        """Keep links that are still asked for, open new ones, close the rest; all have the same deadline."""
        for name in [n for n, peer in self._peers.items() if receivers.get(n) != peer.receiver]:
            self._peers.pop(name).link.close()
        new = {name: receiver for name, receiver in receivers.items() if name not in self._peers}
        deadline = time.monotonic() + self._stall_s
        for receiver in new.values():
            announce(self._store, receiver.link, 0)
        for name, receiver in new.items():
            try:
                link = open_link(self._backend, self._store, receiver.link, 0, 1 + receiver.workers,
                                 self._world.device, self._stall_s, deadline)  # fmt: skip
            except InfrastructureFailure as error:
                self._role.log.warning("%s does not get weights: %s", name, error)
            else:
                self._peers[name] = _Peer(receiver, link)

    def _start_together(self, version: str) -> None:
        """Wait until every engine has stopped sampling, leave out those that do not, and give the rest the sign."""
        deadline = time.monotonic() + self._ready_s

        def wait(peer: _Peer) -> None:
            keys = [ready_key(peer.receiver.link, version, rank) for rank in range(1, 1 + peer.receiver.workers)]
            wait_until(lambda: self._store.check(keys), "an engine that is to stop sampling", deadline)

        self._each(wait)
        self._each(lambda peer: self._store.set(go_key(peer.receiver.link, version), ""))

    def _each(self, action: Callable[[_Peer], object]) -> None:
        """Do this for every engine; one for which it fails is left behind."""
        for name, peer in list(self._peers.items()):
            try:
                action(peer)
            except InfrastructureFailure as error:
                self._role.log.warning("%s is left behind: %s", name, error)
                self._peers.pop(name).link.close()


def sender_of(plan: RunPlan, engine: ProcessPlan) -> int:
    """The trainer rank that sends to `engine`: one on its GPU, if there is any; else they take turns."""
    trainers = plan.of("trainer")
    beside = [t.index for t in trainers if plan.shares_gpu(t, engine)]
    return beside[0] if beside else engine.index % len(trainers)

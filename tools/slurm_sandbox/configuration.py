"""The configuration files of a sandbox, as text. Only what one machine without systemd, cgroups or GPUs forces, and
what makes tests quick, differs from a plain cluster."""

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.slurm_sandbox.layout import Layout

GPU_TYPE = "virtual"
NODE_MEMORY_MB = 64_000
GRACE_S = 5
SLURM_CONF = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket={munge_socket},cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# Nodes may claim more processors and memory than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
# Only the backfill scheduler starts heterogeneous jobs, every 30 s by default.
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_resolution=10,bf_hetjob_immediate,bf_continue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=2
MinJobAge=300
SlurmctldTimeout=10
SlurmdTimeout=5
# A lost node is down after two pings, each of which retries for this long.
MessageTimeout=5
UnkillableStepTimeout=10
{accounting}
NodeName=DEFAULT State=UNKNOWN Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory}
{nodes}
PartitionName=DEFAULT State=UP MaxTime=INFINITE DefaultTime=00:10:00 DefMemPerCPU=100 OverSubscribe=NO
{partitions}
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5"""
NO_ACCOUNTING = """\
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none"""
SLURMDBD_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
SlurmUser={user}
PidFile={directory}/run/slurmdbd.pid
LogFile={directory}/log/slurmdbd.log
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""


def write(layout: Layout) -> None:
    """Write every file to `etc/`."""
    folder = layout.conf.parent
    folder.mkdir(parents=True, exist_ok=True)
    layout.conf.write_text(slurm_conf(layout))
    (folder / "gres.conf").write_text(gres_conf(layout))
    # No cgroup is ever used, but slurmd 22.05 starts a plugin all the same, and only this one starts everywhere.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "hosts").write_text(hosts(layout, Path("/etc/hosts").read_text()))
    dbd = folder / "slurmdbd.conf"
    dbd.touch(mode=0o600)
    dbd.write_text(slurmdbd_conf(layout))


def slurm_conf(layout: Layout) -> str:
    return SLURM_CONF.format(
        **_common(layout),
        controller_port=layout.base_port,
        cpus=layout.cpus,
        memory=NODE_MEMORY_MB,
        accounting=_accounting(layout),
        nodes="\n".join(_node_line(layout, index) for index in range(layout.nodes)),
        partitions="\n".join(_partitions(layout)),
    )


def slurmdbd_conf(layout: Layout) -> str:
    return SLURMDBD_CONF.format(**_common(layout), port=layout.database_port)


def gres_conf(layout: Layout) -> str:
    """GPUs need device files, or tasks are not told theirs; nobody opens them."""
    if not layout.gpu_names:
        return ""
    files = f"{layout.directory}/dev/gpu[0-{layout.gpus - 1}]"
    return f"NodeName={','.join(layout.gpu_names)} Name=gpu Type={GPU_TYPE} File={files}\n"


def hosts(layout: Layout, of_machine: str) -> str:
    """`/etc/hosts` of the nodes: the machine's own, then every node's address."""
    lines = [f"{layout.node_address(index)} {name}" for index, name in enumerate(layout.names)]
    return "\n".join([of_machine.rstrip("\n"), f"127.0.0.1 {host_name()}", *lines]) + "\n"


def partition(name: str, nodes: Sequence[str], options: Mapping[str, str]) -> str:
    """A line of slurm.conf."""
    return " ".join([f"PartitionName={name} Nodes={','.join(nodes)}", *(f"{key}={options[key]}" for key in options)])


def host_name() -> str:
    return socket.gethostname().partition(".")[0]


def _common(layout: Layout) -> dict[str, str]:
    return {"host": host_name(), "user": pwd.getpwuid(os.geteuid()).pw_name, "directory": str(layout.directory),
            "munge_socket": str(layout.munge_socket)}  # fmt: skip


def _accounting(layout: Layout) -> str:
    if not layout.accounting:
        return NO_ACCOUNTING
    return ACCOUNTING.format(port=layout.database_port, munge_socket=layout.munge_socket)


def _node_line(layout: Layout, index: int) -> str:
    name = layout.names[index]
    host = host_name() if layout.isolation == "none" else name
    # The weight keeps jobs without GPUs off these nodes while others are free.
    gres = f" Gres=gpu:{GPU_TYPE}:{layout.gpus} Weight=2" if name in layout.gpu_names else ""
    address, port = layout.node_address(index), layout.node_port(index)
    return f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port}{gres}"


def _partitions(layout: Layout) -> list[str]:
    firm = {"PriorityTier": "10", "PreemptMode": "OFF"}
    lines = [
        partition("all", layout.names, {"Default": "YES", **firm}),
        partition("cpu", layout.names[:1], firm),
        partition(
            "preemptible", layout.names, {"PriorityTier": "1", "PreemptMode": "REQUEUE", "GraceTime": str(GRACE_S)}
        ),
    ]
    if layout.gpu_names:
        lines.append(partition("gpu", layout.gpu_names, firm))
    return lines

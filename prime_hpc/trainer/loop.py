"""One rank of the trainer, from start to end. RL and SFT run the same loop; only where batches come from differs."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from prime_hpc.algorithms.losses import MicroBatchTensors, TokenCounts, compute_loss, count_tokens
from prime_hpc.algorithms.tenants import Tenancy, split_by_adapter
from prime_hpc.cluster.role import Role
from prime_hpc.config.run import RunConfig
from prime_hpc.trainer import distributed
from prime_hpc.trainer.checkpoints import Checkpointer
from prime_hpc.trainer.compilation import compilations
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.lora import initialise
from prime_hpc.trainer.measure import BatchResult, BatchTotals, Stopwatch, performance, summarise
from prime_hpc.trainer.memory.accumulation import hold_gathered
from prime_hpc.trainer.memory.states import keep_on_host
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.optim import WHOLE, GuardedOptimizer
from prime_hpc.trainer.optimizers import build_optimizers
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.profiler import StepProfiler
from prime_hpc.trainer.record_source import RecordSource
from prime_hpc.trainer.row import PackedRow
from prime_hpc.trainer.self_check import check_scores
from prime_hpc.trainer.sft_source import SFTSource
from prime_hpc.trainer.weights_writer import WeightsWriter
from prime_hpc.transport.batches import BatchSource, open_source
from prime_hpc.transport.messages import MicroBatch, PolicyVersion, RankBatch, StepReport


def run(role: Role) -> None:
    """Train from the base model or the plan's checkpoint until the source, or `max_steps`, says that it is done."""
    config, world = role.config, distributed.join(role)
    lineage = role.plan.forks[-1].lineage if role.plan.forks else 0
    policy = build_policy(config, world)
    optimizer = open_optimizer(policy, config, world)
    checkpointer = Checkpointer(role, world, policy, optimizer.optimizers, lineage)
    step = _restore(role, policy, checkpointer)
    check_scores(policy, config, world, role.log)
    writer = WeightsWriter(role, world, policy)
    serving = config.mode == "rl"
    if serving:
        writer.publish(PolicyVersion(lineage, step))
    role.log.info("%s (%s) of %.2fM parameters, attention by %s, over %d ranks on %s, from step %d",
                  policy.config.model_type, policy.impl, sum(p.numel() for p in policy.parameters()) / 1e6,
                  policy.kernels, world.size, world.device, step)  # fmt: skip
    role.rendezvous.publish("ready", step=step)
    source, profiler = _open_source(role, world, policy), StepProfiler(role, world)
    report, batch = checkpointer.report, None
    while step < config.max_steps:
        watch = Stopwatch()
        role.reach("batch.before")
        with watch("wait_for_batch"):
            received = source.receive(step + 1, report, checkpointer.newest)
        if received.write_weights:
            writer.write_whole()
            continue
        if not received.micro_batches:
            break
        batch, step = received, step + 1
        if batch.lr is not None:
            optimizer.retune(batch.lr)
        profiler.begin(step)
        role.reach("step.before")
        role.rendezvous.publish("training", step=step)
        role.heart.progress(f"training step {step}")
        with watch("forward_backward"):
            result = forward_backward(policy, batch, config, world, PolicyVersion(lineage, step - 1), watch)
        role.reach("step.during")
        with watch("optimizer"):
            optimized = optimizer.step(step, result.losses) | policy.balance_experts(config.trainer.router_bias_rate)
        role.reach("step.after")
        with watch("publish"):
            if serving:
                writer.publish(PolicyVersion(lineage, step))
        role.reach("update.after")
        with watch("checkpoint"):
            checkpointer.save_if_due(step, batch.journal_offset)
        report = _report(role, step, result, optimized, {**watch.seconds(), **checkpointer.costs()}, world)
        checkpointer.note(report)
        profiler.end(step)
        if batch.last:
            break
    profiler.close()
    role.reach("shutdown.before")
    checkpoint = checkpointer.finish(step, batch.journal_offset) if batch else role.plan.checkpoint
    role.reach("shutdown.during")
    writer.export()
    source.finish(step, report, checkpointer.newest)
    role.rendezvous.publish("trained", trained=True, step=step, checkpoint=str(checkpoint) if checkpoint else None)
    role.reach("shutdown.after")
    distributed.leave()


def open_optimizer(policy: PolicyModel, config: RunConfig, world: distributed.World) -> GuardedOptimizer:
    """The optimisers of every tenant, with their states where the configuration wants them."""
    tenants = {tenant: build_optimizers(part, config.optimizer) for tenant, part in policy.tenants().items()}
    optimizer = GuardedOptimizer(tenants, config.optimizer, config.max_steps, config.trainer.max_skipped_steps)
    if config.trainer.optimizer_offload:
        for each in optimizer.optimizers:
            keep_on_host(each, world.device)
    return optimizer


def forward_backward(
    policy: PolicyModel,
    batch: RankBatch,
    config: RunConfig,
    world: distributed.World,
    version: PolicyVersion,
    watch: Stopwatch,
) -> BatchResult:
    """Accumulate the gradient of the batch's loss under the weights of `version`; the result is alike on all ranks."""
    rows = [(micro, split_by_adapter(micro)) for micro in batch.micro_batches]
    counts = _count_tokens(policy, [part for _, parts in rows for part in parts], world)
    hf_config, totals, apart = policy.config.to_dict(), BatchTotals(), len(config.env.train) > 1
    for i, (micro, parts) in enumerate(rows):
        if config.trainer.gather_once:
            hold_gathered(policy, last=i == len(rows) - 1)
        tensors = MicroBatchTensors.of(micro, world.device, by_source=apart)
        with watch.on(world.device, "forward"):
            logprobs, entropy = policy(PackedRow.of(micro, tensors, batch.images))
            loss = torch.zeros((), device=world.device)
            for part in parts:
                tenant = policy.tenant_of(part.adapter)
                theirs = tensors if len(parts) == 1 else MicroBatchTensors.of(part.micro, world.device, by_source=apart)
                own, metrics = compute_loss(logprobs[part.tokens], entropy[part.tokens], theirs, config.loss,
                                            counts[tenant], version.pack())  # fmt: skip
                loss = loss + own
                totals.add(tenant, own, metrics)
        with watch.on(world.device, "backward"):
            loss.backward()
        totals.count(micro, hf_config, frozen=policy.lora is not None)
    result = totals.reduce(world)
    # alone, an adapter would not see this batch if it had nothing to train on
    losses = {tenant: loss for tenant, loss in result.losses.items() if tenant == WHOLE or counts[tenant]}
    return replace(result, losses=losses)


def _count_tokens(policy: PolicyModel, parts: list[Tenancy], world: distributed.World) -> dict[str, TokenCounts]:
    """The normalisers of each tenant, over the rows of all ranks."""
    micros: dict[str, list[MicroBatch]] = {tenant: [] for tenant in policy.tenants()}
    for part in parts:
        micros[policy.tenant_of(part.adapter)].append(part.micro)
    counts = torch.stack([count_tokens(own).tensor() for own in micros.values()])
    dist.all_reduce(counts)
    return {tenant: TokenCounts.from_tensor(row // world.row_ranks)
            for tenant, row in zip(micros, counts, strict=True)}  # fmt: skip


def _restore(role: Role, policy: PolicyModel, checkpointer: Checkpointer) -> int:
    """Load the plan's checkpoint, that of another run, or the base model, which a checkpoint of adapters leaves out;
    returns the step that the weights come from."""
    start = role.config.start_from
    if policy.lora or not (role.plan.checkpoint or start.path):
        load_weights(policy, Path(role.config.model.path))
    if policy.lora:
        initialise(policy.lora, role.config.seed)
    if role.plan.checkpoint:
        return checkpointer.load(Path(role.plan.checkpoint))
    if start.path:
        checkpointer.take_over(Path(start.path), optimizer=start.optimizer)
    return 0


def _open_source(role: Role, world: distributed.World, policy: PolicyModel) -> BatchSource:
    if role.config.mode == "sft":
        return SFTSource(role, world, policy)
    if role.config.mode == "replay":
        return RecordSource(role, world)
    return open_source(role, world.dp_rank, world.dp_size, asks=world.rank % world.row_ranks == 0)


def _report(
    role: Role,
    step: int,
    result: BatchResult,
    optimized: dict[str, float],
    times: dict[str, float],
    world: distributed.World,
) -> StepReport | None:
    """Rank 0's account of a step, which it also logs."""
    if not world.first:
        return None
    metrics = {**result.metrics(), **optimized, **performance(result, times, world), **times}
    if role.config.trainer.compile:
        metrics |= compilations()
    role.log.info(summarise(step, metrics))
    return StepReport(step=step, metrics=metrics)

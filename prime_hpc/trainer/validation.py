"""Loss and accuracy on rows that are not trained."""

import torch

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.row import PackedRow
from prime_hpc.trainer.sft_batches import RowPacker
from prime_hpc.trainer.sft_order import Draw


class Validation:
    """Rows, packed once and divided among the ranks. All ranks make and call it alike."""

    def __init__(self, packer: RowPacker, draws: list[Draw], world: World):
        plan = packer.plan(draws)
        self._micro_batches, self._world, self.empty = packer.fill(plan), world, plan.empty
        packer.close()

    def measure(self, policy: PolicyModel) -> dict[str, float]:
        """Mean of `-logπ` over the tokens that would be trained, and the share of them that greedy decoding would have
        taken, each behind the true tokens before it."""
        totals = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        for micro in self._micro_batches:
            row = PackedRow.of(micro, MicroBatchTensors.of(micro, self._world.device))
            logprobs, hits = policy.rate(row)
            totals += torch.stack([-logprobs.double().sum(), hits.double().sum(), totals.new_tensor(len(row.scored))])
        loss, hits, count = (
            sum(parts) for parts in zip(*gather(totals.tolist())[:: self._world.row_ranks], strict=True)
        )
        return {"val/loss": loss / count, "val/accuracy": hits / count, "val/tokens": count}

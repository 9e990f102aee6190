"""Members that differ by their seed, one a process, and vote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from runner.config import check
from runner.parallel.processes import Processes
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.run import Run


@dataclass
class Ensemble(Processes):
    """Each process trains a member on the whole data: member i is the run of `seed` + i, to the last bit.

    Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles (2017). An
    evaluation asks every member, and all of them together: `eval/accuracy` is the vote's, `eval/member_0/accuracy` the
    first member's; `eval/disagreement` is the share of members' answers that are not the vote's. Training curves are
    the members' means. A checkpoint's model is the first member, for every other mode to go on with; the others are in
    their ranks' files.
    """

    @property
    def data_shard(self) -> tuple[int, int]:
        return (0, 1)

    @property
    def incomparable(self) -> str:
        return "" if self.world_size == 1 else "each trains another model: member i is the run of seed + i"

    @property
    def random_stream(self) -> int:
        return 0

    def personalise(self, run: Run) -> None:
        run.seed += self.rank
        run.config = run.config | {"seed": run.seed}

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        shard, tally = self.eval_shard, torch.zeros(2, dtype=torch.int64, device=device)
        with torch.inference_mode(), precision.autocast():
            alone = workload.summarize(workload.evaluate(partial(self.infer, model), shard, device))
            sums = workload.evaluate(partial(self._vote, model, workload, tally), shard, device)
        members: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(members, alone)
        metrics = workload.summarize(sums)
        for member, of_member in enumerate(members):
            metrics |= {f"member_{member}/{name}": value for name, value in of_member.items()}
        return metrics | {"disagreement": int(tally[0]) / max(1, int(tally[1]))}, sums

    def _vote(
        self, model: torch.nn.Module, workload: Workload, tally: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """What the members say together of `inputs`; counts in `tally` how many of their answers are others, of all."""
        own = model(inputs).float().contiguous()
        outputs = [torch.empty_like(own) for _ in range(self.world_size)]
        torch.distributed.all_gather(outputs, own)
        stacked = torch.stack(outputs)
        vote = workload.vote(stacked)
        answers = stacked.argmax(-1)
        tally += torch.stack([(answers != vote.argmax(-1)).sum(), torch.tensor(answers.numel(), device=tally.device)])
        return vote

    def reduce(self, sums: Sums) -> Sums:
        """The members' mean: each has seen the whole batch."""
        return {name: total / self.world_size for name, total in super().reduce(sums).items()}

    def share_of(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        tensors, moments = self._state_on_cpu(model, optimizer, kept=True) if self.rank > 0 else ({}, {})
        return {"members": self.world_size, "tensors": tensors, "moments": moments}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved = state.get("members", 1)
        why, remedy = f"the checkpoint holds {saved} member{'s' * (saved > 1)}", f"parallel.processes={saved}"
        check(saved == self.world_size, "parallel.processes", self.world_size, why, f"{remedy}, or start anew")
        if self.rank > 0:
            self.load_full_state(model, optimizer, state["tensors"], state["moments"])

"""`parallel=ensemble`: each process trains one member of an ensemble, with another seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from runner.batching import Plan
from runner.config.errors import check
from runner.device import sum_dtype
from runner.parallel import full_state
from runner.parallel.collectives import ProcessGroup
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.session import Session
from runner.storage.value_checks import COUNT, check_like
from runner.system.trees import map_tensors
from runner.tracking.metrics import MetricSums


class MemberMeans(ProcessGroup):
    """Collectives whose `all_reduce` returns means over the members: a sum would count each sample once per member."""

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        wide = {name: each.to(sum_dtype(each.device)) for name, each in sums.items()}  # (x + x + x) / 3 has to be x
        means = {name: total / self.world_size for name, total in super().all_reduce(wide).items()}
        return {name: mean.to(sums[name].dtype) for name, mean in means.items()}

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        return total


@dataclass
class Ensemble(MultiProcess):
    """An ensemble of models: each process trains one member on all of the data.

    Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles (2017). Member i
    is bitwise equal to the model of a `parallel=single` run with the seed `seed` + i and the same number of threads.
    Training metrics are means over the members.
    The model in a checkpoint is the first member, from which every other mode can resume; the other members are in the
    files of their ranks (`rank_1.pt`, …). docs/parallel-modes.md says what an evaluation measures.
    """

    description: ClassVar[str] = "ensemble"
    difference: ClassVar[str] = "each process trains another model: member i is the run of seed + i"

    collectives_class: ClassVar[type[ProcessGroup]] = MemberMeans

    def divide(self, session: Session) -> Plan:
        return replace(session.plan, seed=session.plan.seed + session.rank, num_members=session.world_size)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        session, workload = self._session, self._session.workload
        tally = torch.zeros(2, dtype=torch.int64, device=session.device)
        of_rank = workload.summarize(self._sums(partial(self._infer, model)))
        vote = partial(self._vote, tally)
        sums = self._sums(lambda inputs: map_tensors(vote, self._infer(model, inputs)))
        metrics = workload.summarize(sums)
        for member, of_member in enumerate(session.collectives.all_gather(of_rank)):
            metrics |= {f"member_{member}/{name}": value for name, value in of_member.items()}
        if workload.outputs_are_scores:
            metrics["disagreement"] = int(tally[0]) / max(1, int(tally[1]))
        return metrics, sums

    def _vote(self, tally: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """Return the members' vote, and count in `tally` the predictions: those that differ, and all."""
        if answer.is_floating_point():
            answer = answer.to(torch.promote_types(answer.dtype, torch.float32))
        outputs = [
            torch.empty_like(answer, memory_format=torch.contiguous_format) for _ in range(self._session.world_size)
        ]
        torch.distributed.all_gather(outputs, answer.contiguous())
        stacked, workload = torch.stack(outputs), self._session.workload
        vote = workload.vote(stacked)
        if workload.outputs_are_scores:
            answers = stacked.argmax(-1)
            tally += torch.stack([(answers != vote.argmax(-1)).sum(), tally.new_tensor(answers.numel())])
        return vote

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        tensors, state = full_state.collect(model, optimizer, keep=True) if self._session.rank > 0 else ({}, {})
        return {"members": self._session.world_size, "tensors": dict(tensors), "moments": state}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved, members = state.get("members", 1), self._session.world_size
        check_like(saved, COUNT, "members")
        why = f"the checkpoint holds {saved} member{'s' * (saved > 1)}"
        remedy = f"parallel.processes={saved}, or start anew"
        check(saved == members, "parallel.processes", members, why, remedy)
        if self._session.rank > 0:
            check_like(state, {"members": int, "tensors": dict, "moments": dict}, "member")
            self.load_full_state(model, optimizer, state["tensors"], state["moments"])

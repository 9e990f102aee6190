"""A sampler for Optuna that avoids values with which every combination has been tried."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial


class UntriedSampler(BaseSampler):
    """A sampler that suggests what another sampler suggests, or a random allowed value if that is not allowed.

    Args:
        sampler: the other sampler, which samples each parameter independently.
        allowed: the values that may be suggested.
        seed: the seed of the random choice.
    """

    def __init__(self, sampler: BaseSampler, allowed: Sequence[Any], seed: int):
        self._sampler, self._allowed, self._seed = sampler, allowed, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        value = self._sampler.sample_independent(study, trial, param_name, param_distribution)
        return value if value in self._allowed else random.Random(self._seed).choice(self._allowed)

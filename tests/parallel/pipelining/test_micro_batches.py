"""How a batch is split: what each schedule takes, and what is said of the rest."""

from __future__ import annotations

import pytest

from runner.config.errors import ConfigError
from runner.parallel.pipelining.micro_batches import Rule, divisors, micro_batches

GPIPE = Rule("gpipe", 2, 2)


def test_divisors() -> None:
    assert divisors(120) == [d for d in range(1, 121) if 120 % d == 0]
    assert divisors(49) == [1, 7, 49]
    assert divisors(1) == [1]


@pytest.mark.parametrize(
    ("samples", "size", "count", "rule", "found"),
    [
        (120, 12, None, GPIPE, 10),
        (120, None, 10, GPIPE, 10),
        (120, 12, 10, GPIPE, 10),
        (120, None, None, GPIPE, 8),
        (120, None, None, Rule("gpipe", 4, 4), 15),
        (12, None, None, Rule("gpipe", 3, 3), 6),
        (7, None, None, GPIPE, 7),
        (7, 7, None, GPIPE, 1),
        (1, None, None, GPIPE, 1),
        (48, None, None, Rule("1f1b", 3, 3), 12),
        (10, None, None, Rule("interleaved_1f1b", 8, 4), 5),
        (64, None, None, Rule("zero_bubble", 2, 2), 8),
    ],
)
def test_how_many_there_are(samples: int, size: int | None, count: int | None, rule: Rule, found: int) -> None:
    assert micro_batches(samples, size, count, rule) == found


@pytest.mark.parametrize(
    ("samples", "size", "count", "rule", "words"),
    [
        (
            120,
            7,
            None,
            GPIPE,
            ["split_size: got 7", "does not divide the 120", "split_size=6 or parallel.split_size=8"],
        ),
        (120, 200, None, GPIPE, ["split_size: got 200", "no more than 120 samples", "parallel.split_size=120"]),
        (64, None, 65, GPIPE, ["num_micro_batches: got 65", "no more than 64", "parallel.num_micro_batches=64"]),
        (64, None, 3, GPIPE, ["got 3", "num_micro_batches=2 or parallel.num_micro_batches=4"]),
        (64, 8, 4, GPIPE, ["num_micro_batches: got 4", "split_size=8 makes 8", "name one"]),
        (64, 32, None, Rule("1f1b", 4, 4), ["split_size: got 32", "1f1b takes as many as there are stages", "=16"]),
        (8, None, 1, Rule("interleaved_1f1b", 4, 2), ["interleaved_1f1b takes as many as there are processes", "=2"]),
        (30, None, 5, Rule("zero_bubble", 2, 2), ["got 5", "2 equal rounds", "=3 or parallel.num_micro_batches=6"]),
        (2, None, None, Rule("1f1b", 3, 3), ["schedule: got '1f1b'", "a batch of 2 samples", "schedule=gpipe"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(
    samples: int, size: int | None, count: int | None, rule: Rule, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        micro_batches(samples, size, count, rule)
    for word in words:
        assert word in str(refusal.value)

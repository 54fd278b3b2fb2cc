"""The search over engine arguments: its order, its early end, its frontier, its choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtests.kit import slo
from tools.tuning import BadSearch, Settings, Space, Trial, chosen, frontier, overshoot, search

KEPT = slo.parse("ttft_p99<320ms, error_rate<=0%")
SPACE = Space(
    instances=(1, 2, 4),
    gpu_memory_utilization=(0.9, 0.6, 0.3),
    max_num_seqs=(256, 128, 512),
    max_num_batched_tokens=(8_192, 2_048),
)


def machine(settings: Settings) -> Trial:
    """One that keeps the objective with two instances or more, and needs half of its memory and 2,048 tokens a step."""
    ttft = 0.8 / settings.instances + (settings.max_num_batched_tokens - 2_048) / 1e5
    ttft += 1.0 if settings.gpu_memory_utilization < 0.5 else 0.0
    return Trial(settings=settings, found={"ttft_p99": ttft - 0.1, "error_rate": 0.0}, probed=ttft > 0.9)


def test_the_least_of_the_machine_that_keeps_the_objective_is_chosen() -> None:
    """Among those that keep it: the fewest stubs, then the least memory, then the most room."""
    trials = search(SPACE, KEPT, machine, 40)
    best = chosen(trials, KEPT)
    assert best is not None
    assert best.settings == Settings(
        instances=2, gpu_memory_utilization=0.6, max_num_seqs=256, max_num_batched_tokens=2_048
    )
    assert best in frontier(trials, KEPT)


def test_nothing_is_tried_twice_and_the_search_ends_by_itself() -> None:
    """A round over the settings that brings nothing is the last."""
    tried: list[Settings] = []

    def counted(settings: Settings) -> Trial:
        tried.append(settings)
        return machine(settings)

    search(SPACE, KEPT, counted, 1_000)
    assert len(tried) == len(set(tried)) < 20
    assert tried[0] == SPACE.start()


def test_the_search_ends_after_as_many_trials_as_allowed() -> None:
    """Whatever was found by then."""
    assert len(search(SPACE, KEPT, machine, 3)) == 3


def test_more_requests_than_tokens_in_a_step_are_not_tried() -> None:
    """VLLM refuses them."""
    space = replace(SPACE, max_num_batched_tokens=(256,), max_num_seqs=(256, 512))
    assert {trial.settings.max_num_seqs for trial in search(space, KEPT, machine, 99)} == {256}


def test_what_could_not_run_or_was_stopped_is_never_chosen() -> None:
    """Nor a part of the frontier."""
    start = SPACE.start()
    fast = {"ttft_p99": 0.01, "error_rate": 0.0}
    trials = [Trial(settings=start, error="no memory"), Trial(settings=start, found=fast, probed=True)]
    assert chosen(trials, KEPT) is None
    assert frontier(trials, KEPT) == []


def test_the_frontier_holds_what_no_other_beats() -> None:
    """More of the machine must bring more room."""
    start = SPACE.start()

    def trial(instances: int, ttft: float) -> Trial:
        return Trial(settings=replace(start, instances=instances), found={"ttft_p99": ttft, "error_rate": 0.0})

    one, two, worse = trial(1, 0.4), trial(2, 0.2), trial(4, 0.3)
    assert frontier([worse, two, one], KEPT) == [one, two]


def test_how_far_an_objective_is_missed() -> None:
    """As a share of its bound, either way round; what was not measured is missed."""
    (less,) = slo.parse("ttft_p99<200ms")
    (more,) = slo.parse("output_tokens_per_s>100")
    assert overshoot(less, {"ttft_p99": 0.3}) == pytest.approx(0.5)
    assert overshoot(more, {"output_tokens_per_s": 150}) == pytest.approx(-0.5)
    assert overshoot(less, {}) == float("inf")


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("instances", (0,), "instances needs at least one value, all above 0, got 0"),
        ("gpu_memory_utilization", (1.5,), "gpu_memory_utilization is a share of at most 1, got 1.5"),
    ],
)
def test_a_space_without_sense_is_refused(name: str, values: Any, sentence: str) -> None:
    """The sentence names the setting and the bound."""
    with pytest.raises(BadSearch) as refused:
        replace(SPACE, **{name: values})
    assert str(refused.value) == sentence

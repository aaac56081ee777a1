"""The statistics of `ab`: planted slow-downs are found from 5% on, equal trees raise no alarm, a moving control is
inconclusive.
"""

import itertools
import math
import random

import pytest

from retro_bench.compare import ab, gate_statistics
from retro_bench.compare.gate_statistics import Ratio

PAIRS, SAMPLES = 5, 40


def batch(rng, slowdown, noise=0.02, layout=0.004, spikes=0.05):
    """Draw samples as measured machines give them: an offset per pair of processes, a shared drift, noise and rare
    spikes.
    """
    pairs = []
    for _ in range(PAIRS):
        offset, drift, base, head = rng.gauss(0, layout), 0.0, [], []
        for _ in range(SAMPLES):
            drift += rng.gauss(0, 0.01)
            for times, factor in ((base, 1.0), (head, slowdown * math.exp(offset))):
                spike = rng.uniform(1.1, 2) if rng.random() < spikes else 1.0
                times.append(1e-3 * factor * math.exp(drift + rng.gauss(0, noise)) * spike)
        pairs.append((base, head))
    return pairs


def decide(rng, slowdown):
    first, control = gate_statistics.ratio(batch(rng, slowdown)), gate_statistics.ratio(batch(rng, 1.0))
    second = gate_statistics.ratio(batch(rng, slowdown)) if gate_statistics.looks_slower(first) else None
    return gate_statistics.verdict(first, second, control)


def test_no_false_alarm_in_200_comparisons_of_equal_trees():
    rng = random.Random(1)
    verdicts = [decide(rng, 1.0) for _ in range(200)]
    assert verdicts.count("regression") == 0 and verdicts.count("warn") == 0


@pytest.mark.parametrize("slowdown", [1.08, 1.15, 1.5])
def test_a_planted_slowdown_is_found(slowdown):
    rng = random.Random(2)
    verdicts = [decide(rng, slowdown) for _ in range(50)]
    assert verdicts.count("regression") >= 48, verdicts


def test_a_slowdown_of_four_percent_warns_and_does_not_fail():
    rng = random.Random(3)
    verdicts = [decide(rng, 1.04) for _ in range(50)]
    assert verdicts.count("warn") >= 45 and verdicts.count("regression") <= 1


def taker(rng):
    return lambda items: ((item, batch(rng, 1.1, layout=0.03)) for item in items)


def test_processes_that_differ_by_three_percent_need_more_pairs_and_then_tell_ten_percent():
    rng = random.Random(5)
    verdicts, widths, counts = [], [], []
    for _ in range(40):
        ((_, first),) = ab.sampled(taker(rng), ["item"], lambda text: None)
        counts.append(len(first))
        estimate = gate_statistics.ratio(first)
        widths.append(gate_statistics.settled(estimate))
        ((_, again),) = ab.sampled(taker(rng), ["item"], lambda text: None)
        second = gate_statistics.ratio(again)
        verdicts.append(gate_statistics.verdict(estimate, second, Ratio(1, 1, 1)))
    assert set(counts) > {PAIRS} and max(counts) <= PAIRS * ab.MOST_BATCHES
    assert widths.count(True) >= 30 and verdicts.count("regression") >= 38, verdicts


def test_more_pairs_are_taken_of_wide_intervals_alone_and_a_refusal_stays():
    rng = random.Random(6)
    asked = []

    def take(items):
        asked.append(list(items))
        refusal = ab.Refusal("head", "error", "broke")
        drawn = {"quiet": batch(rng, 1.0), "noisy": batch(rng, 1.0, layout=0.3), "broken": refusal}
        return ((i, drawn[i]) for i in items)

    results = dict(ab.sampled(take, ["quiet", "noisy", "broken"], lambda text: None))
    assert asked == [["quiet", "noisy", "broken"], *[["noisy"]] * (ab.MOST_BATCHES - 1)]
    assert (
        len(results["quiet"]) == PAIRS
        and len(results["noisy"]) == PAIRS * ab.MOST_BATCHES
        and results["broken"].reason == "broke"
    )


@pytest.mark.parametrize(
    ("slowdown", "asked"),
    [(1.0, ["a-b"]), (1.2, ["a-b", "a-a", "a-b"]), (0.8, ["a-b", "a-a"])],
    ids=["equal", "slower", "faster"],
)
def test_only_what_may_have_changed_is_controlled(slowdown, asked, monkeypatch):
    rng, seen = random.Random(7), []

    def sampled(base, other, items, threads, check, say, worker_pairs, head):
        seen.append(f"{base}-{other}")
        return [(item, batch(rng, slowdown if other != base else 1.0)) for item in items]

    monkeypatch.setattr(ab, "batch", sampled)
    (outcome,) = ab.compare("a", "b", ["item"], 1, lambda text: None)
    assert seen == asked and outcome.verdict == {1.0: "ok", 1.2: "regression", 0.8: "faster"}[slowdown]
    assert (outcome.control is None) == (slowdown == 1.0)


def test_unchanged_needs_a_narrow_interval():
    assert gate_statistics.unchanged(Ratio(1.01, 0.99, 1.02))
    assert not gate_statistics.unchanged(Ratio(1.01, 0.95, 1.08)) and not gate_statistics.unchanged(
        Ratio(1.04, 1.03, 1.05)
    )
    assert not gate_statistics.unchanged(Ratio(0.9, 0.89, 0.91))


def test_a_speed_up_is_no_regression():
    rng = random.Random(4)
    assert {decide(rng, 0.8) for _ in range(20)} == {"faster"}


def test_the_interval_comes_from_pairs_not_from_samples():
    """One slow pair of five with a thousand samples each is not evidence."""
    quiet, slow = ([1.0] * 1000, [1.0] * 1000), ([1.0] * 1000, [1.5] * 1000)
    estimate = gate_statistics.ratio([quiet] * 4 + [slow])
    assert estimate.value == 1.0 and estimate.low == 1.0
    assert gate_statistics.verdict(estimate, None, Ratio(1, 1, 1)) == "ok"


SLOW, QUICK = Ratio(1.2, 1.15, 1.25), Ratio(1.0, 0.99, 1.01)


@pytest.mark.parametrize(
    ("first", "second", "control", "verdict"),
    [
        (SLOW, SLOW, QUICK, "regression"),
        (SLOW, SLOW, Ratio(1.01, 0.99, 1.02), "regression"),
        (SLOW, SLOW, Ratio(1.03, 1.0, 1.05), "inconclusive"),  # equal trees differ
        (SLOW, SLOW, Ratio(0.97, 0.95, 1.0), "inconclusive"),
        (SLOW, None, QUICK, "warn"),  # one batch alone never fails
        (SLOW, QUICK, QUICK, "warn"),
        (QUICK, SLOW, QUICK, "ok"),
        (Ratio(1.2, 1.0, 1.4), SLOW, QUICK, "ok"),  # the interval holds 1
    ],
)
def test_two_slow_batches_beside_a_quiet_control_fail(first, second, control, verdict):
    assert gate_statistics.verdict(first, second, control) == verdict


def test_slow_spikes_of_the_machine_do_not_move_the_estimate():
    base = [1.0, 1.0, 9.0, 1.0, 1.0]
    assert gate_statistics.pair_ratio((base, [1.0, 1.0, 1.0, 1.0, 30.0])) == 1.0


def test_the_interval_leaves_the_same_share_out_at_both_ends(monkeypatch):
    drawn = itertools.count()
    monkeypatch.setattr(random.Random, "choices", lambda self, centres, k: [next(drawn) / 1e4] * k)
    got, left_out = gate_statistics.ratio([([1.0], [1.0])] * 3), (1 - gate_statistics.CONFIDENCE) / 2
    last = gate_statistics.RESAMPLES - 1
    assert math.log(got.low) * 1e4 == pytest.approx(left_out * gate_statistics.RESAMPLES, abs=1)
    assert math.log(got.high) * 1e4 == pytest.approx(last - left_out * gate_statistics.RESAMPLES, abs=1)

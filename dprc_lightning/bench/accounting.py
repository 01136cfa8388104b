"""What it costs a run to know epsilon after each of its steps."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.callbacks.epsilon import EpsilonLookup


def measure_accounting(
    event: StepEvent, steps: int, delta: float, rounds: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Make the lookup and ask it after each step, in turn with composing the whole run once, `rounds` times over.

    Args:
        event: The mechanism of each step.
        steps: Steps of the run.
        delta: The target delta.
        rounds: How often each is timed.
        progress: Called with what is about to be done.

    Returns:
        Seconds to build the lookup and of one lookup, and both together per step in milliseconds (minimum and median
        over the rounds); for comparison, milliseconds of composing anew by `Accountant`, which would be the cost of
        each step; epsilon after the last step by both; and the setting. Times are CPU seconds of the process.
    """
    builds, lookups, anew = [], [], []
    # What is imported at the first use is no part of a round.
    certified, lookup = Accountant([(event, steps)]).upper(delta), EpsilonLookup(event, steps, delta)
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}")
        started = time.process_time()
        lookup = EpsilonLookup(event, steps, delta)
        built = time.process_time()
        for step in range(1, steps + 1):
            lookup.after(step)
        looked_up = time.process_time()
        certified = Accountant([(event, steps)]).upper(delta)
        anew.append(time.process_time() - looked_up)
        builds.append(built - started)
        lookups.append((looked_up - built) / steps)
    per_step = [1000 * (build / steps + seconds) for build, seconds in zip(builds, lookups, strict=True)]
    return {
        "event": event.to_dict(),
        "steps": steps,
        "delta": delta,
        "rounds": rounds,
        "machine": {"cores": os.cpu_count()},
        "build_seconds_min": min(builds),
        "build_seconds_median": statistics.median(builds),
        "lookup_seconds_min": min(lookups),
        "lookup_seconds_median": statistics.median(lookups),
        "amortised_ms_per_step_min": min(per_step),
        "amortised_ms_per_step_median": statistics.median(per_step),
        "compose_ms_min": 1000 * min(anew),
        "compose_ms_median": 1000 * statistics.median(anew),
        "epsilon": lookup.final,
        "epsilon_composed": certified,
    }

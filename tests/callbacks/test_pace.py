"""Remaining time and lines of a plain log, by a clock that the test turns."""

from dprc_lightning.callbacks.pace import Pace


def test_only_the_steps_of_this_process_count_and_the_first_one_only_alone():
    pace = Pace(900, 1000, now=50.0)
    assert (pace.position, pace.remaining) == ("900/1000", "-")
    pace.count(901, 80.0)
    assert (pace.position, pace.remaining) == ("901/1000", "0:49:30"), "99 steps of 30 s"
    pace.count(902, 82.0)
    assert pace.remaining == "0:03:16", "98 steps of 2 s: the slow first one is left out"
    pace.count(903, 86.0)
    assert pace.remaining == "0:04:51", "97 steps of 3 s"
    pace.count(1000, 90.0)
    assert (pace.position, pace.remaining) == ("1000/1000", "0:00:00")


def test_without_a_total_nothing_is_promised():
    pace = Pace(0, None, now=0.0)
    pace.count(1, 1.0)
    pace.count(2, 2.0)
    assert (pace.position, pace.remaining) == ("2/?", "-")


def due(total, seconds_per_step, first=0):
    pace, found = Pace(first, total, now=0.0), []
    for done in range(first + 1, total + 1):
        pace.count(done, (done - first) * seconds_per_step)
        if pace.line_due():
            found.append(done)
    return found


def test_quick_steps_have_a_line_for_each_twentieth_and_the_end():
    assert due(205, 0.01) == [*range(11, 205, 11), 205]
    assert due(4, 0.01) == [1, 2, 3, 4]


def test_slow_steps_have_a_line_every_thirty_seconds():
    assert due(1000, 7.0, first=980) == [985, 990, 995, 1000]
    assert due(1000, 40.0, first=995) == [996, 997, 998, 999, 1000]

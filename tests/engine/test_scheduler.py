"""Rows and the order of requests, without a model."""

import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.engine.scheduler import Scheduler


def test_a_request_that_may_not_run_waits_and_keeps_its_place():
    scheduler = Scheduler(3, max_waiting=9)
    for name in "abc":
        scheduler.add(name)
    assert scheduler.place("bc".__contains__) == (0, "b")
    assert [scheduler.can_place(names.__contains__) for names in ("b", "c")] == [False, True]
    assert [scheduler.place(), scheduler.place()] == [(1, "a"), (2, "c")]


def test_the_queue_is_bounded():
    scheduler = Scheduler(1, max_waiting=2)
    scheduler.add("a")
    scheduler.add("b")
    assert scheduler.is_full
    with pytest.raises(queue.Full, match="2 requests are waiting"):
        scheduler.add("c", priority=5)
    scheduler.place()
    scheduler.add("c")
    assert (scheduler.clear(), scheduler.clear()) == (["a", "b", "c"], [])


@given(
    num_rows=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from(["add", "place", "remove", "put back"]), st.integers(0, 9)), max_size=60),
)
def test_any_order_of_events_equals_a_sorted_list(num_rows, events):
    scheduler, rows, waiting, priorities = Scheduler(num_rows, max_waiting=5), {}, [], {}
    for number, (event, choice) in enumerate(events):
        if event == "add" and len(waiting) < 5:
            scheduler.add(number, choice)
            priorities[number] = choice
            waiting = sorted([*waiting, (-choice, number)])
        elif event == "place":
            free = [row for row in range(num_rows) if row not in rows]
            expected = (free[0], waiting.pop(0)[1]) if free and waiting else None
            assert scheduler.place() == expected
            rows |= {} if expected is None else dict([expected])
        elif event == "remove" and (known := [*rows.values(), *(request for _, request in waiting)]):
            request = known[choice % len(known)]
            had = next((row for row, each in rows.items() if each == request), None)
            assert scheduler.remove(request) == had
            rows = {row: each for row, each in rows.items() if each != request}
            waiting = [entry for entry in waiting if entry[1] != request]
        elif event == "put back" and rows:
            row = sorted(rows)[choice % len(rows)]
            assert scheduler.put_back(rows[row]) == row
            request = rows.pop(row)
            waiting = sorted([*waiting, (-priorities[request], request)])
        assert scheduler.placed == sorted(rows.values(), key=lambda request: (-priorities[request], request))
        assert scheduler.rows == [rows.get(row) for row in range(num_rows)]
        assert scheduler.num_waiting == len(waiting)

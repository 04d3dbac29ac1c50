from __future__ import annotations

import threading

import pytest

from quantkit.parallel import count_threads, run_jobs


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_job_runs_once_and_is_reported_once(threads: int) -> None:
    ran: list[int] = []
    reported: list[int] = []
    run_jobs(range(100), ran.append, threads=threads, done=reported.append)
    assert sorted(ran) == sorted(reported) == list(range(100))


def test_jobs_start_in_order_and_are_taken_one_at_a_time() -> None:
    """A hundred thousand jobs are never all in memory: the iterable is read as threads get free."""
    taken = 0

    def jobs():
        nonlocal taken
        for number in range(1000):
            taken = number
            yield number

    ahead: list[int] = []
    run_jobs(jobs(), lambda number: ahead.append(taken - number), threads=3)
    assert max(ahead) <= 3


def test_reports_come_in_the_callers_thread() -> None:
    threads = set()
    run_jobs(range(10), lambda _: None, done=lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_the_first_error_ends_the_others_at_their_next_job() -> None:
    ran: list[int] = []

    def work(number: int) -> None:
        if number == 3:
            raise ValueError("job 3")
        ran.append(number)

    with pytest.raises(ValueError, match="job 3"):
        run_jobs(range(10_000), work, threads=2)
    assert len(ran) < 9_000


def test_an_error_of_the_iterable_or_of_the_report_is_raised() -> None:
    def jobs():
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        run_jobs(jobs(), lambda _: None)

    def report(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(range(5), lambda _: None, done=report)


def test_there_is_at_least_one_thread() -> None:
    assert 1 <= count_threads() <= 16

"""Jobs run by a few threads, in order, with nothing held but what is being worked on.

`concurrent.futures` queues every job and every result and cannot stop in the middle of a map; here
threads take the next job when they are free, so memory is one job a thread, and an interrupt or the
first error ends the others at their next job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Job = TypeVar("Job")

# Beyond this reading and writing limit the speed, and every thread holds buffers.
MOST_THREADS = 16


def count_threads() -> int:
    """How many threads work by default: the cores this process may use, at most MOST_THREADS."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(MOST_THREADS, cores)


def run_jobs(
    jobs: Iterable[Job],
    work: Callable[[Job], None],
    *,
    threads: int | None = None,
    done: Callable[[Job], None] | None = None,
) -> None:
    """Call `work` on every job from `threads` threads; jobs are started in the order given.

    done: called in this thread after each job, in the order they finish.
    Raises what `work`, `done` or the iterable raises first; the other threads then stop after the
    job they are at. The same on KeyboardInterrupt.
    """
    source = iter(jobs)
    lock = threading.Lock()
    changed = threading.Condition()
    finished: list[Job] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def take() -> Job | None:
        with lock:
            return None if stop.is_set() else next(source, None)

    def loop() -> None:
        try:
            while (job := take()) is not None:
                work(job)
                with changed:
                    finished.append(job)
                    changed.notify()
        except BaseException as error:  # of any kind: it is raised again in the caller's thread
            stop.set()
            with changed:
                errors.append(error)
                changed.notify()

    pool = [threading.Thread(target=loop, daemon=True) for _ in range(threads or count_threads())]
    try:
        for thread in pool:
            thread.start()
        while any(thread.is_alive() for thread in pool) or finished:
            with changed:
                if not finished and not errors:
                    changed.wait(0.05)
                ready, finished[:] = list(finished), []
            if done is not None:
                for job in ready:
                    done(job)
            if errors:
                break
    finally:
        stop.set()
        for thread in pool:
            thread.join()
    if errors:
        raise errors[0]

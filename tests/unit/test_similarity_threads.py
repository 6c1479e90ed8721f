"""Torch on the estimator's thread: no team of threads, and no other thread's count is touched.

In processes of their own: other tests must not see what these set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PRELUDE = """
import json, os, threading
from contextlib import contextmanager
import torch
from sgl_krul.similarity import Estimator, RowJob

# Whatever the machine and the environment: a count of more than one for all threads, so far.
torch.set_num_threads(4)

def tasks():
    return len(os.listdir("/proc/self/task"))

def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

def product():
    a = torch.ones((2000, 2000))
    return a @ a

class Spy:
    # Is asked on the estimator's thread: notes what that thread sees, the second time after a layer of work.
    def __init__(self):
        self.seen = []

    @contextmanager
    def keys(self, layer):
        self.seen.append([torch.get_num_threads(), niceness()])
        yield torch.ones((8192, 4, 64))

def estimate(estimator):
    # More than enough for torch to share an operator among threads, where it may.
    spy, sums, positions = Spy(), [], torch.arange(8192 - 64, 8192)
    assert estimator.submit(RowJob(torch.ones((2, 64, 8, 64)), positions, 0.1, 8192, spy, sums.append))
    assert estimator.drain(120)
    assert sums[0].rows == 64
    return spy.seen
"""


def child(script: str) -> Any:
    """What the script prints, run in a process with four threads for torch."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_counts_of_other_threads_stay() -> None:
    seen = child(
        """
before = torch.get_num_threads()
estimator = Estimator(64 << 20)
worker = estimate(estimator)
print(json.dumps({
    "before": before,
    "after": torch.get_num_threads(),
    "new thread": in_thread(torch.get_num_threads),
    "worker": [count for count, _ in worker],
}))
estimator.close()
"""
    )
    assert seen == {"before": 4, "after": 4, "new thread": 4, "worker": [1, 1]}


def test_a_count_chosen_later_stays_out_of_the_worker() -> None:
    seen = child(
        """
estimator = Estimator(64 << 20)
torch.set_num_threads(3)
worker = estimate(estimator)
print(json.dumps([torch.get_num_threads(), in_thread(torch.get_num_threads), worker[-1][0]]))
estimator.close()
"""
    )
    assert seen == [3, 3, 1]


def test_no_team_of_threads_is_started() -> None:
    seen = child(
        """
product()  # the main thread's own team
before = tasks()
estimator = Estimator(64 << 20)
estimate(estimator)
print(json.dumps(tasks() - before))
estimator.close()
"""
    )
    assert seen == 1


def test_any_other_thread_would_start_a_team() -> None:
    """The control of the test above: what it counts is there to be seen."""
    seen = child(
        """
product()
before = tasks()
print(json.dumps(in_thread(lambda: (product(), tasks())[1]) - before))
"""
    )
    assert seen >= 4  # the thread, and three more of its team


def test_only_the_worker_stands_back() -> None:
    seen = child(
        """
estimator = Estimator(64 << 20, nice=7)
before = niceness()
worker = estimate(estimator)
print(json.dumps([[nice - before for _, nice in worker], niceness() - before, in_thread(niceness) - before]))
estimator.close()
"""
    )
    assert seen == [[7, 7], 0, 0]

"""Torch on a background thread without teams of threads, and without a trace on any other thread."""

from __future__ import annotations

import os
import sys
import threading

import torch

__all__ = ["compute_alone"]


def compute_alone(nice: int = 0) -> None:
    """From now on the calling thread computes torch operators by itself, and stands back by `nice` (Linux).

    Call it in a thread of your own, before its first operator. The thread counts of all other threads, those
    that are yet to start too, stay as they are.
    """
    # What torch.set_num_threads(n) does (2.14 with OpenMP and MKL; tests/unit/test_similarity_threads.py): it
    # sets n for the calling thread alone (omp_set_num_threads, mkl_set_num_threads_local), and keeps n in a
    # global that every thread reads once, at its own first operator. So a 1 here leaves the scheduler's
    # thread alone, but would reach every thread that starts later: a second, short-lived thread puts the
    # global back. NumPy would be no way out: the threads of its OpenBLAS are one setting for all threads.
    others = torch.get_num_threads()  # in a new thread: what any new thread gets
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,), name="krul-thread-count")
    restore.start()
    restore.join()
    if nice and sys.platform == "linux":
        # Linux gives every thread its own niceness, and takes a thread's id for a process's. Upwards needs no
        # rights.
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))

"""Threads that compute on tensors side by side."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from growkit.base.lazy import torch


@contextmanager
def workers(count: int, prepare: Callable[[], None] = lambda: None) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads, each of which computes on one core; jobs that wait end with it.

    Otherwise each would have as many threads of torch's as there are cores.

    Args:
        count: number of threads.
        prepare: called in each of them first.
    """
    threads = torch.get_num_threads()

    def start() -> None:
        torch.set_num_threads(1)
        prepare()

    try:
        with ThreadPoolExecutor(count, initializer=start) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(threads)  # a worker's setting applies to every later thread

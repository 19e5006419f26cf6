"""Concurrent requests, in tasks or in threads.

Both ways are written by hand: they have little in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
Progress = bool | Callable[[int, int], None] | None


async def async_run_in_order(
    calls: Sequence[Callable[[], Awaitable[T]]], concurrency: int, progress: Progress
) -> list[T]:
    """Return the calls' results in order; the first failure cancels all others and is raised."""
    semaphore = asyncio.Semaphore(max(1, concurrency))
    failed = asyncio.Event()
    with progress_counter(progress, len(calls)) as count:

        async def run(call: Callable[[], Awaitable[T]]) -> T:
            async with semaphore:
                if failed.is_set():
                    raise asyncio.CancelledError
                try:
                    result = await call()
                except BaseException:
                    failed.set()
                    raise
            count()
            return result

        tasks = [asyncio.ensure_future(run(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def run_in_order(calls: Sequence[Callable[[], T]], concurrency: int, progress: Progress) -> list[T]:
    """Return the calls' results in order; the first failure cancels waiting calls and is raised."""
    failed = threading.Event()

    def run(call: Callable[[], T]) -> T:
        if failed.is_set():
            raise CancelledError
        try:
            return call()
        except BaseException:
            failed.set()
            raise

    workers = max(1, min(concurrency, len(calls)))
    with progress_counter(progress, len(calls)) as count, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, call) for call in calls]
        for future in futures:
            future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else count())
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for future in futures:
            error = future.exception() if future.done() and not future.cancelled() else None
            if error is not None and not isinstance(error, CancelledError):
                raise error
        return [future.result() for future in futures]


@contextlib.contextmanager
def progress_counter(progress: Progress, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call, from any thread, for each request that has finished."""
    lock, finished = threading.Lock(), 0
    bar = None
    if progress is True:
        from rich.progress import Progress as Bar

        bar = Bar(transient=True)
        task = bar.add_task("requests", total=total)

    def count() -> None:
        nonlocal finished
        with lock:
            finished += 1
            if bar is not None:
                bar.update(task, completed=finished)
            elif callable(progress):
                progress(finished, total)

    with bar or contextlib.nullcontext():
        yield count

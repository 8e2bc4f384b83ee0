"""Work done by threads ahead of its use."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LatestCache(Generic[Key, Value]):
    """A cache of the latest few values. Several threads may ask; each value is made once."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._futures: dict[Key, Future[Value]] = {}

    def get(self, key: Key, make: Callable[[Key], Value]) -> Value:
        with self._lock:
            future, is_new = self._futures.get(key), False
            if future is None:
                future, is_new = Future(), True
                self._futures[key] = future
                for old in list(self._futures)[: -self._most]:
                    del self._futures[old]
        if is_new:
            try:
                future.set_result(make(key))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def in_background(
    make: Callable[[Key], Value], keys: Iterator[Key], threads: int, waiting: int
) -> Iterator[Value]:
    """`make` of each key in order, by threads that run ahead.

    Besides those in the making, up to `waiting` results are kept for their use.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="reader") as pool:
        ahead = deque(pool.submit(make, key) for key in itertools.islice(keys, threads + waiting))
        try:
            while ahead:
                value = ahead.popleft().result()
                ahead.extend(pool.submit(make, key) for key in itertools.islice(keys, 1))
                yield value
        finally:
            for future in ahead:
                future.cancel()

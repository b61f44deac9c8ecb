"""Turns methods for coroutines into methods for threads: the work runs on the shared event loop, and the caller waits.

Owns: this conversion. Never touches: what the methods do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from palestra.episodes.client.loop_thread import SHARED

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Facade(Generic[A]):
    """The part of a client for threads; `inner` is the same part for coroutines."""

    def __init__(self, inner: A):
        self.inner = inner


def waits(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Facade[A], P], T]:
    @wraps(method)
    def wait(self: Facade[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return SHARED.wait(method(self.inner, *args, **kwargs))

    return wait


def waits_for(
    make: Callable[[T], R], method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Facade[A], P], R]:
    """Makes a blocking method of a coroutine method. `make` converts what the coroutine returns into its counterpart
    for threads."""

    @wraps(method)
    def wait(self: Facade[A], *args: P.args, **kwargs: P.kwargs) -> R:
        return make(SHARED.wait(method(self.inner, *args, **kwargs)))

    return wait


def iterates(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Facade[A], P], Iterator[T]]:
    @wraps(method)
    def iterate(self: Facade[A], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return SHARED.each(method(self.inner, *args, **kwargs))

    return iterate

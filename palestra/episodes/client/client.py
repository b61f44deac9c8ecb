"""The client of the episode API for threads: the client, its runs, listeners and episodes.

Each class stands before its counterpart for coroutines (`async_client`, `async_run`, `async_listener`,
`async_episode`), which does the work on the shared event loop, while the caller waits.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, SupportsFloat, TypeVar, Unpack

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import MODEL_RETRIES, AsyncEpisode, EpisodeView, OnError
from palestra.episodes.client.async_listener import AsyncListener, AsyncPushed
from palestra.episodes.client.async_run import AsyncRun
from palestra.episodes.client.loop_thread import SHARED
from palestra.episodes.client.results import ResultParts, as_result, result_of
from palestra.episodes.client.retries import RETRY_S
from palestra.types.episodes import EndAnswer, EpisodeKind, EpisodeResult, NewGroup, PlayedGroup, Registered, RunInfo

if TYPE_CHECKING:
    import openai

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


class Pushed(Facade[AsyncPushed]):
    """A received group. Store it, then call `ack`; otherwise it is sent again."""

    @property
    def group(self) -> PlayedGroup:
        return self.inner.group

    @property
    def number(self) -> int:
        return self.inner.number

    ack = waits(AsyncPushed.ack)


class Listener(Facade[AsyncListener]):
    """Receives pushed groups; made by `Run.listen`, for one thread."""

    @property
    def address(self) -> str:
        return self.inner.address

    def __enter__(self) -> Listener:
        SHARED.wait(self.inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        SHARED.wait(self.inner.__aexit__())

    def __iter__(self) -> Iterator[Pushed]:
        return map(Pushed, SHARED.each(aiter(self.inner)))


class Run(Facade[AsyncRun]):
    """A run, made by `EpisodeClient.run`. Every call may be repeated without harm."""

    @property
    def info(self) -> RunInfo:
        """State of the run at the last call."""
        return self.inner.info

    @property
    def name(self) -> str:
        return self.inner.name

    def register(self, groups: Iterable[NewGroup]) -> list[Registered]:
        """Registers groups, waiting while the queue is full. Groups that are already registered do not change."""
        return SHARED.wait(self.inner.register(list(groups)))  # list() here: a generator is the caller's code

    def listen(
        self, address: str, *, after: int | None = None, wait_s: float | None = None, told: str | None = None
    ) -> Listener:
        """The same as `groups`, pushed to `address` over ZeroMQ, each committed by its acknowledgement:

            with run.listen("tcp://127.0.0.1:5555") as groups:
                for pushed in groups:
                    save(pushed.group)
                    pushed.ack()

        Groups up to `after`, the last one that is safe here, are acknowledged unseen (None: none are). Ends when none
        came for `wait_s`. `told`: how the server reaches it, where that is another address."""
        SHARED.wait(self.inner.check_cursor(after))
        return Listener(self.inner.listen(address, after=after, wait_s=wait_s, told=told))

    refresh = waits(AsyncRun.refresh)
    groups = iterates(AsyncRun.groups)
    commit = waits(AsyncRun.commit)
    publish = waits(AsyncRun.publish)
    pause = waits(AsyncRun.pause)
    resume = waits(AsyncRun.resume)
    cancel = waits(AsyncRun.cancel)
    delete = waits(AsyncRun.delete)
    requeue = waits(AsyncRun.requeue)
    episodes = waits(AsyncRun.episodes)
    picture = waits(AsyncRun.picture)


class Episode(EpisodeView, Facade[AsyncEpisode]):
    """An episode that this client plays: its task, its model, its end."""

    def __init__(self, inner: AsyncEpisode):
        EpisodeView.__init__(self, inner.held_lease)
        Facade.__init__(self, inner)

    def openai(self, **options: Any) -> openai.OpenAI:
        """An OpenAI client whose calls belong to this attempt; options are those of the SDK."""
        from openai import OpenAI

        options.setdefault("max_retries", MODEL_RETRIES)
        return OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def end(self, reward: SupportsFloat | None = None, **parts: Unpack[ResultParts]) -> EndAnswer:
        """Ends the episode; returns when the server has stored the result. `is_kept` of the answer is false if it came
        too late. Raises InvalidResult for an impossible result."""
        return self.end_with(result_of(reward, **parts))  # read here: a reward may be a tensor

    end_with = waits(AsyncEpisode.end_with)
    release = waits(AsyncEpisode.release)
    check = waits(AsyncEpisode.check)
    leave = waits(AsyncEpisode.leave)


class EpisodeClient(Facade[AsyncEpisodeClient]):
    """Client of a server's episodes, for any number of threads of one process. `key`: API key (None: TINKER_API_KEY).
    `retry_s`: how long to retry while the server does not answer."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        client_id: str | None = None,
        retry_s: float = RETRY_S,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ):
        super().__init__(AsyncEpisodeClient(url, key, client_id=client_id, retry_s=retry_s, tls=tls, proxy=proxy))

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def client_id(self) -> str:
        return self.inner.client_id

    do = waits(AsyncEpisodeClient.do)

    # Playing

    @contextmanager
    def episode(
        self,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float | None = None,
        on_error: OnError | str = OnError.END,
    ) -> Iterator[Episode]:
        """Claims one episode to play, waiting at most `wait_s`. If the block raises, the episode ends as failed or is
        released, by `on_error`; if it is left without `end`, or by Ctrl-C, the episode is released."""
        on_error = OnError(on_error)
        episode = self.claim_one(run, kind, wait_s=wait_s, lease_s=lease_s)
        try:
            yield episode
        except BaseException as error:
            episode.leave(error, on_error)
            raise
        else:
            episode.leave()

    claim_one = waits_for(Episode, AsyncEpisodeClient.claim_one)
    claim = waits_for(lambda found: [Episode(one) for one in found], AsyncEpisodeClient.claim)

    def end_many(self, ends: Iterable[tuple[Episode, EpisodeResult | SupportsFloat]]) -> list[EndAnswer]:
        """Ends many episodes in few requests; a refused result is returned in its place, not raised."""
        results = [(episode.inner, as_result(result)) for episode, result in ends]
        return SHARED.wait(self.inner.end_many(results))

    # Training and looking on

    run = waits_for(Run, AsyncEpisodeClient.run)
    runs = waits(AsyncEpisodeClient.runs)
    run_info = waits(AsyncEpisodeClient.run_info)
    delete_run = waits(AsyncEpisodeClient.delete_run)
    episodes = waits(AsyncEpisodeClient.episodes)
    episode_info = waits(AsyncEpisodeClient.episode_info)
    timeline = waits(AsyncEpisodeClient.timeline)
    export = iterates(AsyncEpisodeClient.export)
    requeue = waits(AsyncEpisodeClient.requeue)
    cancel = waits(AsyncEpisodeClient.cancel)

    # Closing

    close = waits(AsyncEpisodeClient.close)

    def __enter__(self) -> EpisodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

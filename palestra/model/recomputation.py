"""Parts of a model that keep their inputs alone and are computed again in the backward pass.

The second computation is for what backward passes read, and the output of a part's last linear layer is not among it:
whoever runs a part names the sites that may be left out then, and linear layers ask. What they return in place of the
output is memory that nothing has written, in the shape of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch.utils.checkpoint import checkpoint

from palestra.model.lora.layout import SiteName

_left_out: ContextVar[Set[SiteName]] = ContextVar("_left_out", default=frozenset())


def recomputed(run: Callable[..., Any], *args: Any, unread: Set[SiteName] = frozenset()) -> Any:
    """run(*args), which is called again in the backward pass. `unread`: sites in it whose outputs no backward pass of
    this call reads."""
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), leave_out(unread)),
    )


@contextmanager
def leave_out(sites: Set[SiteName]) -> Iterator[None]:
    token = _left_out.set(sites)
    try:
        yield
    finally:
        _left_out.reset(token)


def is_left_out(site: SiteName) -> bool:
    return site in _left_out.get()

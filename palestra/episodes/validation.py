"""Validation of registrations, results and settings, and the hashes by which they are compared."""

from __future__ import annotations

import hashlib
import math
import re

import msgspec

from palestra.episodes.errors import BoardError
from palestra.episodes.limits import EpisodeLimits
from palestra.types import MAX_TEMPERATURE
from palestra.types.episodes import ClaimRequest, EpisodeResult, NewGroup, RunSettings, SamplingBounds

ID = re.compile(r"[A-Za-z0-9._:#/-]{1,128}")
MAX_REASON = 500
MAX_MODEL = 1000
SEED_BITS = 53  # every language's JSON reads such a number exactly
INT32 = 2**31
MAX_WEIGHTS = 64  # each environment has a queue of its own, and a claim looks at all of them


class ResultInvalid(ValueError):
    """A result is not valid; the message says why."""


def digest(*parts: str, size: int = 16) -> bytes:
    """Hashes the parts; ("ab", "c") and ("a", "bc") are different."""
    described = b""
    for part in parts:
        data = part.encode()
        described += len(data).to_bytes(8, "little") + data
    return hashlib.blake2b(described, digest_size=size).digest()


def derived_seed(group_id: str, index: int) -> int:
    return int.from_bytes(digest(group_id, str(index), size=8), "little") >> (64 - SEED_BITS)


def canonical(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record, order="sorted").decode()


def clean_reason(text: str) -> str:
    return text.replace("\0", "")[:MAX_REASON]


def check_id(what: str, value: str) -> None:
    if not ID.fullmatch(value):
        raise BoardError(400, f"{what}: 1 to 128 of A-Z a-z 0-9 . _ : # / - are allowed, found {value[:80]!r}")


def check_model(model: str) -> None:
    if not model or len(model) > MAX_MODEL or not model.isprintable():
        raise BoardError(400, f"model: 1 to {MAX_MODEL} printable characters are allowed, found {model[:80]!r}")


def check_settings(settings: RunSettings) -> None:
    _check(0.001 <= settings.share <= 1000, f"share: 0.001 to 1000 is allowed, found {settings.share}")
    _check(0 <= settings.max_lag < INT32, f"max_lag: 0 or more is allowed, found {settings.max_lag}")
    _check(_is_positive(settings.lease_s), f"lease_s must be more than 0 seconds, found {settings.lease_s}")
    _check(1 <= settings.max_attempts < INT32, f"max_attempts: 1 or more is allowed, found {settings.max_attempts}")
    is_backoff = math.isfinite(settings.backoff_s) and settings.backoff_s >= 0
    _check(is_backoff, f"backoff_s must be 0 seconds or more, found {settings.backoff_s}")
    _check(1 <= settings.max_queued < INT32, f"max_queued: 1 or more is allowed, found {settings.max_queued}")
    _check(1 <= settings.max_ready < INT32, f"max_ready: 1 or more is allowed, found {settings.max_ready}")
    for name, most in (("max_calls", settings.max_calls), ("max_sampled_tokens", settings.max_sampled_tokens)):
        _check(most is None or 0 <= most < INT32, f"{name} must be 0 or more, or null for no limit; found {most}")
    _check(
        0 < settings.client_share <= 1, f"client_share must be more than 0 and at most 1; found {settings.client_share}"
    )
    _check_weights(settings.environment_weights)
    _check_bounds(settings.sampling)


def _check_weights(weights: dict[str, float]) -> None:
    where = "environment_weights"
    _check(
        len(weights) <= MAX_WEIGHTS, f"{where}: at most {MAX_WEIGHTS} environments are allowed, found {len(weights)}"
    )
    for name, weight in weights.items():
        _check(bool(name), f"{where}: an environment has no name")
        _check(0.001 <= weight <= 1000, f"{where}: 0.001 to 1000 is allowed, found {weight} for {name[:80]!r}")


def _check_bounds(bounds: SamplingBounds) -> None:
    least, most = bounds.min_temperature, bounds.max_temperature
    is_least = 0 <= least <= MAX_TEMPERATURE
    _check(is_least, f"sampling.min_temperature: 0 to {MAX_TEMPERATURE:g} is allowed, found {least}")
    is_most = most is None or (math.isfinite(most) and most >= least)
    _check(is_most, f"sampling.max_temperature: min_temperature ({least:g}) or more is allowed, found {most}")
    _check(0 <= bounds.min_top_p <= 1, f"sampling.min_top_p: 0 to 1 is allowed, found {bounds.min_top_p}")
    for name, count in (("max_tokens", bounds.max_tokens), ("max_n", bounds.max_n)):
        is_count = count is None or 1 <= count < INT32
        _check(is_count, f"sampling.{name} must be 1 or more, or null for no limit; found {count}")


def check_group(group: NewGroup, limits: EpisodeLimits) -> str:
    """Checks a group and returns its canonical text."""
    check_id("group_id", group.group_id)
    if (wrong := _what_is_wrong(group, limits)) is not None:
        raise BoardError(400, f"group {group.group_id}: {wrong}")
    try:
        text = canonical(group)
    except (TypeError, ValueError, RecursionError) as error:
        raise BoardError(400, f"group {group.group_id}: it cannot be written as JSON: {error}") from None
    if (size := len(text.encode())) > limits.max_task_bytes:
        found = f"it may have at most {limits.max_task_bytes} bytes with its task, found {size}"
        raise BoardError(413, f"group {group.group_id}: {found}")
    return text


def _what_is_wrong(group: NewGroup, limits: EpisodeLimits) -> str | None:
    """Returns what is wrong, in words. They are made only for a refused group, because thousands of groups arrive in a
    second."""
    size, count = group.size, group.size if group.count is None else group.count
    if size < 1:
        return f"size: 1 or more is allowed, found {size}"
    if count < size:
        return f"count must be at least size ({size}), or the group is never complete; found {count}"
    if count > limits.max_members:
        return f"count must be at most {limits.max_members}; found {count}"
    if group.min_size is not None and not 1 <= group.min_size <= size:
        return f"min_size: 1 to size ({size}) is allowed, found {group.min_size}"
    if len(group.seeds) > count:
        return f"seeds: at most {count} are allowed, one for each episode; found {len(group.seeds)}"
    if group.seeds and not -(2**63) <= min(group.seeds) <= max(group.seeds) < 2**63:
        return "seeds: each must fit into 64 bits with its sign"
    if abs(group.priority) >= INT32:
        return f"priority must fit into 32 bits, found {group.priority}"
    if group.deadline_s is not None and not _is_positive(group.deadline_s):
        return f"deadline_s must be more than 0 seconds, found {group.deadline_s}"
    if group.max_attempts is not None and not 1 <= group.max_attempts < INT32:
        return f"max_attempts: 1 or more is allowed, found {group.max_attempts}"
    return None


def check_claim(request: ClaimRequest, limits: EpisodeLimits) -> None:
    check_id("client_id", request.client_id)
    check_id("claim_id", request.claim_id)
    if not 1 <= request.max_n <= limits.max_claim:
        raise BoardError(400, f"max_n: 1 to {limits.max_claim} is allowed, found {request.max_n}")
    if request.lease_s is not None and not _is_positive(request.lease_s):
        raise BoardError(400, f"lease_s must be more than 0 seconds, found {request.lease_s}")


def result_text(result: EpisodeResult, limits: EpisodeLimits) -> str:
    """Returns the canonical text of a result. Raises `ResultInvalid` if it cannot be accepted."""
    values = [*result.step_rewards, *result.agent_rewards.values(), *result.metrics.values()]
    values.append(0.0 if result.reward is None else result.reward)
    if not all(map(math.isfinite, values)):
        raise ResultInvalid("rewards and metrics must be finite numbers")
    if result.reward is None and result.error is None and not result.step_rewards and not result.agent_rewards:
        raise ResultInvalid("it has no reward; give reward, step_rewards or agent_rewards, or an error")
    try:
        if {*map(type, values)} != {float}:  # a caller in this process may have passed 1 where a client sends 1.0
            result = msgspec.json.decode(msgspec.json.encode(result), type=EpisodeResult)
        text = canonical(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultInvalid(f"it cannot be written as JSON: {error}") from None
    if (size := len(text.encode())) > limits.max_result_bytes:
        raise ResultInvalid(f"it may have at most {limits.max_result_bytes} bytes, found {size}")
    return text


def _check(is_right: bool, detail: str) -> None:
    if not is_right:
        raise BoardError(400, detail)


def _is_positive(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0

"""Results of a gym as NeMo RL reads them: a log of messages with token ids."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palestra.gym.errors import GymConfigError, GymError
from palestra.gym.nemo_rl.settings import NemoRlSettings
from palestra.rollouts.gym.results import GymModelCall, TokenIdFlaw, model_calls
from palestra.types.gym import FAILURE_CLASS, MASK_SAMPLE, ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.util.json_types import JsonMapping, JsonObject

Message = JsonObject
MASK_REASON = "mask_reason"
INSTANCE = "instance_config"
"""Field in which NeMo RL's `_extract_mask_sample_flags` finds `mask_sample`."""
NO_TURN = "no_generation"
"""Mark of a result without output of the model: its prompt may be longer than the model's context."""


class NemoRlRowFailed(GymError):
    """A row failed. The error has one text, so that it can be pickled."""


class RowUnreachable(NemoRlRowFailed):
    """A row failed because of the servers: it may succeed later."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that is needed for texts beside the ids."""

    def batch_decode(self, sequences: list[list[int]]) -> list[str]: ...


class NemoRlResultReader:
    """Reads the results of one gym."""

    def __init__(self, settings: NemoRlSettings) -> None:
        """Raises GymConfigError."""
        self._settings = settings
        self._torch = _torch() if settings.has_tensors else None
        self.tokenizer: TokenDecoder | None = None

    def read(self, result: JsonObject) -> tuple[JsonObject, str | None]:
        """Returns NeMo RL's result, and the reason if it is masked. Changes the given one: ids are replaced by texts.
        Raises NemoRlRowFailed with `is_strict`."""
        response = result.get("response")
        output = response.get("output") if isinstance(response, Mapping) else None
        found = model_calls(output if isinstance(output, list) else [])
        if found.flaw is TokenIdFlaw.NO_LOGPROB or (found.flaw is not None and self._settings.is_strict):
            raise NemoRlRowFailed(found.why)
        flaw = found.flaw or (None if found.calls else NO_TURN)
        _check_reward(result.get("reward"))
        if flaw == NO_TURN and self._settings.is_strict:
            raise NemoRlRowFailed("the model has written nothing; is the prompt longer than the model's context?")
        log = [message for call in found.calls for message in self._messages(call)]
        self._write_texts(found.calls)
        for item in output or ():
            if isinstance(item, dict):
                for field in (*TOKEN_FIELDS, ROUTED_EXPERTS):
                    item.pop(field, None)
        if flaw is not None:
            result |= {MASK_SAMPLE: True, MASK_REASON: str(flaw)}
        if result.get(MASK_SAMPLE):
            result |= _masked(result)
        log = log or self._stand_in()
        return {"message_log": log, "input_message_log": log[:1], "full_result": result}, flaw

    def failed(self, failure: JsonMapping) -> JsonObject:
        """Returns the result of a row that was given up: reward 0, and masked."""
        log = self._stand_in()
        full = {"response": {"output": []}, **failure, "reward": 0.0, **_masked(failure)}
        full.setdefault(MASK_REASON, failure.get(FAILURE_CLASS))
        return {"message_log": log, "input_message_log": log[:1], "full_result": full}

    def _messages(self, call: GymModelCall) -> list[Message]:
        text, is_reasoning = _message_text(call.item)
        tags = self._settings.thoughts
        is_malformed = any(text.count(tag) > 1 if is_reasoning else tag in text for tag in tags)
        return [
            {"role": "user", "content": "", "token_ids": self._ids(call.read)},
            {
                "role": "assistant",
                "content": "",
                "token_ids": self._ids(call.tokens),
                "generation_logprobs": self._numbers(call.logprobs),
                "is_invalid_tool_call": any(pattern in text for pattern in self._settings.invalid_tool_calls),
                "has_malformed_thinking": is_malformed,
            },
        ]

    def _stand_in(self) -> list[Message]:
        """Returns a placeholder: a batch has a place for each row, and each place needs a prompt and an answer."""
        flags = {"is_invalid_tool_call": False, "has_malformed_thinking": False}
        sampled = {"token_ids": self._ids([0]), "generation_logprobs": self._numbers([0.0])}
        return [
            {"role": "user", "content": "", "token_ids": self._ids([0])},
            {"role": "assistant", "content": "", **sampled, **flags},
        ]

    def _write_texts(self, calls: Sequence[GymModelCall]) -> None:
        """Adds texts of what was read and sampled, because ids are not readable. Without a tokenizer there are none."""
        if self.tokenizer is None or not calls:
            return
        prompts = self.tokenizer.batch_decode([list(call.item[TOKEN_FIELDS[0]]) for call in calls])
        sampled = self.tokenizer.batch_decode([call.tokens for call in calls])
        for call, prompt, text in zip(calls, prompts, sampled, strict=True):
            assert isinstance(call.item, dict)
            call.item.update(prompt_str=prompt, generation_str=text)

    def _ids(self, ids: list[int]) -> object:
        return ids if self._torch is None else self._torch.tensor(ids, dtype=self._torch.int64)

    def _numbers(self, numbers: list[float]) -> object:
        return numbers if self._torch is None else self._torch.tensor(numbers, dtype=self._torch.float32)


def _masked(result: JsonMapping) -> JsonObject:
    """Returns the mark that a row is not to be trained on: where gyms look for it, and where NeMo RL does."""
    known = result.get(INSTANCE)
    return {MASK_SAMPLE: True, INSTANCE: {**(known if isinstance(known, Mapping) else {}), MASK_SAMPLE: True}}


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise GymConfigError("has_tensors: torch is not installed; install it, or set has_tensors: false") from None


def _check_reward(reward: object) -> None:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise NemoRlRowFailed(f"its reward is not a number: {str(reward)[:100]}")


def _message_text(item: JsonMapping) -> tuple[str, bool]:
    """Returns the text of the last item of a call, and whether that is reasoning."""
    is_reasoning = item.get("type") == "reasoning"
    parts = item.get("summary") if is_reasoning else item.get("content")
    first = parts[0] if isinstance(parts, list) and parts else None
    text = first.get("text") if isinstance(first, Mapping) else None
    return (text if isinstance(text, str) else ""), is_reasoning

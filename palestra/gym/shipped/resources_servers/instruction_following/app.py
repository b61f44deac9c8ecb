"""Instructions that can be checked: the reward is the share of them that an answer follows, or all or nothing."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

from palestra.gym.errors import BadCall
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, ReverifyMode
from palestra.gym.servers.responses import output_text
from palestra.gym.shipped.resources_servers.instruction_following.checks import CHECKS, follows
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import did_you_mean

MODES = ("binary", "fraction")
FIELDS = ("instruction_id_list", "kwargs", "grading_mode")


class InstructionFollowing(ResourcesServer[ResourcesSettings]):
    reverify_mode = ReverifyMode.STATELESS

    async def verify(
        self,
        response: JsonObject,
        verifier_metadata: JsonObject | None = None,
        instruction_id_list: list[str] | None = None,
        kwargs: list[JsonObject | None] | None = None,
        grading_mode: Literal["binary", "fraction"] | None = None,
    ) -> JsonMapping:
        """Older rows have the instructions beside `verifier_metadata`, newer ones in it."""
        beside = dict(zip(FIELDS, (instruction_id_list, kwargs, grading_mode), strict=True))
        extra: JsonObject = {name: value for name, value in beside.items() if value is not None}
        extra |= verifier_metadata or {}
        names, arguments = extra.get("instruction_id_list"), extra.get("kwargs")
        if not _are_texts(names) or not isinstance(arguments, list) or len(arguments) != len(names):
            raise BadCall(422, "a row needs instruction_id_list and kwargs, one for each instruction")
        if extra.get("grading_mode", "binary") not in MODES:
            raise BadCall(422, f"grading_mode {extra['grading_mode']!r} is none of {', '.join(MODES)}")
        text = output_text(response)
        followed = [self._follows(name, text, given or {}) for name, given in zip(names, arguments, strict=True)]
        share = sum(followed) / len(followed)
        reward = share if extra.get("grading_mode") == "fraction" else float(all(followed))
        return {
            "reward": reward,
            "follow_all_instructions": all(followed),
            "follow_instruction_list": followed,
            "share_followed": share,
        }

    def _follows(self, name: str, text: str, given: JsonMapping) -> bool:
        if name not in CHECKS:
            raise BadCall(422, f"there is no check of {name!r} here; {did_you_mean(name, sorted(CHECKS))}")
        try:
            return follows(name, text, given)
        except (TypeError, AttributeError) as error:
            raise BadCall(422, f"{name}: {error}") from error


def _are_texts(names: Any) -> TypeGuard[list[str]]:
    return isinstance(names, list) and bool(names) and all(isinstance(one, str) for one in names)

"""The base class of text environments, with the names and the behaviour of skyrl_gym's.

An environment written for skyrl_gym runs here as it is, or with its imports changed to `palestra.environments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NotRequired, Self, TypedDict, TypeVar

from palestra.environments.tools import ToolGroup
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

MessageType = dict[str, Any]
"""A message: `role` and `content`, which is text or a list of parts: `{"type": "text", "text": …}` and pictures
(`image_part`)."""
ConversationType = list[MessageType]
"""Messages in the order they were said."""

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class BaseTextEnvStepOutput(TypedDict):
    """What `step` of a text environment returns."""

    observations: ConversationType
    """New messages, for the policy to read before its next turn."""
    reward: float | None
    """The reward of this step. None: it could not be graded, and the rollout will not count."""
    done: bool
    metadata: JsonMapping
    postprocessed_action: NotRequired[str | None]
    """How the action should read. Stored in the metadata; training uses what the policy sampled."""


class Env(Generic[ObsType, ActType]):
    """Something that takes actions. A `with` block closes it."""

    def init(self, *args: object) -> tuple[ObsType, JsonObject]:
        raise NotImplementedError(f"{type(self).__name__} has no init")

    def step(self, action: ActType) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def close(self) -> None:
        """May be called more than once."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> bool:
        self.close()
        return False


class BaseTextEnv(Env[ConversationType, str]):
    """One episode of a task: text in, text out.

    It is made with `env_config` (the same for all tasks) and `extras` (this task's). Subclasses with a constructor of
    their own may call this one without arguments, as in skyrl_gym. If a subclass has `init_async`, `step_async`,
    `close_async` or `get_metrics_async`, these are used; the plain methods are called in threads.
    """

    max_turns: int = 1
    """`extras["max_turns"]` if it is given."""

    def __init__(self, env_config: object = None, extras: JsonMapping | None = None) -> None:
        super().__init__()
        self.env_config = env_config
        self.extras: JsonObject = dict(extras or {})
        self.turns = 0
        self.max_turns = int(self.extras.get("max_turns", type(self).max_turns))
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, JsonObject]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the conversation that the policy sees first, and metadata."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def get_metrics(self) -> JsonPayload:
        """Returns metrics of the episode so far."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[JsonObject]) -> JsonPayload:
        """Aggregates the metrics of many episodes."""
        return mean_of_numbers(metrics)

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            mapping = group.get_tool_to_group_mapping()
            if twice := mapping.keys() & self.tool_to_toolgroup.keys():
                name = min(twice)
                raise ValueError(
                    f"two tools are called {name!r}: in {self.tool_to_toolgroup[name]!r} and {group.name!r}"
                )
            self.tool_to_toolgroup.update(mapping)

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        known = ", ".join(repr(group.name) for group in self.tool_groups) or "none"
        raise ValueError(f"no tool group {tool_group_name!r} in {type(self).__name__} (it has {known})")


def mean_of_numbers(metrics: Sequence[JsonMapping]) -> dict[str, float]:
    """Returns the mean of each metric over the episodes that have it; booleans count as 0 and 1, other types are left
    out."""
    values: dict[str, list[float]] = {}
    for one in metrics:
        for key, value in one.items():
            if isinstance(value, int | float):
                values.setdefault(key, []).append(float(value))
    return {key: sum(found) / len(found) for key, found in values.items()}

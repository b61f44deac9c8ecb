"""Records of what an agent saw of its own rollout: conversations, tool calls, compactions, and what was hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, model_validator

from nemo_gym.config_types import ModelServerRef
from nemo_gym.json_types import JsonObject
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseInputItem


class ObservationModel(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ModelCallRef(ObservationModel):
    """By its id, or by its server and the id of its response."""

    model_call_id: str | None = None
    model_ref: ModelServerRef | None = None
    response_id: str | None = None

    @model_validator(mode="after")
    def _is_known(self) -> ModelCallRef:
        if not self.model_call_id and (self.model_ref is None or not self.response_id):
            raise ValueError("should have model_call_id, or model_ref and response_id")
        return self


class TrajectoryTurn(ObservationModel):
    """One call of the model, as the agent saw it."""

    invocation_id: str
    task_id: str
    rollout_id: str
    turn_no: int = Field(ge=1)
    timestamp: float
    question: Any = None
    answer: Any = None
    reasoning_content: Any = None
    resolved: bool | None = None
    step_count: NonNegativeInt
    model_calls: list[ModelCallRef] = Field(default_factory=list)


class AgentInvocation(ObservationModel):
    """One conversation: of the agent, or of one that it started."""

    kind: Literal["agent_invocation"] = "agent_invocation"
    invocation_id: str
    parent_invocation_id: str | None = None
    spawned_by_tool_call_id: str | None = None
    status: Literal["completed", "failed", "incomplete", "unknown"] = "unknown"
    duration_ms: NonNegativeFloat | None = None
    error_type: str | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    conversation: list[NeMoGymResponseInputItem] = Field(default_factory=list)


class ToolCallObservation(ObservationModel):
    kind: Literal["tool_call"] = "tool_call"
    invocation_id: str
    tool_call_id: str
    sandbox_id: str | None = None
    tool_name: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: NonNegativeFloat | None = None
    timing_source: Literal["executor", "artifact", "harness"] | None = None
    status: Literal["completed", "failed", "timeout", "cancelled", "incomplete", "unknown"] = "unknown"
    error_type: str | None = None

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> ToolCallObservation:
        if self.started_at is not None and self.completed_at is not None and self.completed_at < self.started_at:
            raise ValueError("completed_at is before started_at")
        return self


class TrajectoryToolCall(ToolCallObservation):
    output: Any = None


class SandboxObservation(ObservationModel):
    kind: Literal["sandbox"] = "sandbox"
    role: Literal["agent", "verifier", "environment"]
    provider: str | None = None
    sandbox_id: str | None = None
    outcome: Literal["completed", "failed", "timeout", "oom", "sandbox_error", "cancelled", "unknown"] = "unknown"
    exit_code: int | None = None
    wall_time_s: NonNegativeFloat | None = None
    cpu_time_s: NonNegativeFloat | None = None
    peak_memory_mib: NonNegativeFloat | None = None
    resource_usage_source: str | None = None
    error_type: str | None = None


class ContextCompactionObservation(ObservationModel):
    kind: Literal["context_compaction"] = "context_compaction"
    invocation_id: str
    observed_at: float | None = None
    trigger: str | None = None
    tokens_before: NonNegativeInt | None = None
    tokens_after: NonNegativeInt | None = None
    outcome: Literal["completed", "failed", "aborted", "unknown"] = "unknown"
    summary: str | None = None
    first_kept_item_id: str | None = None
    before_model_call: ModelCallRef | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    after_model_call: ModelCallRef | None = None


class ObservationGap(ObservationModel):
    """Something that could not be seen."""

    code: str
    invocation_id: str | None = None
    detail: str | None = None


AgentObservationRecord = Annotated[
    AgentInvocation | ToolCallObservation | ContextCompactionObservation | SandboxObservation,
    Field(discriminator="kind"),
]


class AgentObservationBundle(ObservationModel):
    source: str
    records: list[AgentObservationRecord] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_a_forest(self) -> AgentObservationBundle:
        """Invocations are there once, and none is its own ancestor."""
        found = [one for one in self.records if isinstance(one, AgentInvocation)]
        parents = {one.invocation_id: one.parent_invocation_id for one in found}
        if len(parents) < len(found):
            raise ValueError("an invocation_id is there twice")
        for start in parents:
            above, seen = parents[start], {start}
            while above is not None and above in parents:
                if above in seen:
                    raise ValueError(f"invocation {start} is its own ancestor")
                seen.add(above)
                above = parents[above]
        return self


class TrajectoryRecord(ObservationModel):
    """A rollout as its agent tells it."""

    schema_version: Literal["1.0"] = "1.0"
    task_id: str
    rollout_id: str
    invocations: list[AgentInvocation] = Field(default_factory=list)
    turns: list[TrajectoryTurn] = Field(default_factory=list)
    model_calls: list[JsonObject] = Field(default_factory=list)
    """Filled in by the collection, from what the model server recorded."""
    tool_calls: list[TrajectoryToolCall] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_of_one_rollout(self) -> TrajectoryRecord:
        invocations = [one.invocation_id for one in self.invocations]
        turns = [(one.invocation_id, one.turn_no) for one in self.turns]
        if len({*invocations}) < len(invocations) or len({*turns}) < len(turns):
            raise ValueError("an invocation, or a turn of one, is there twice")
        if any((one.task_id, one.rollout_id) != (self.task_id, self.rollout_id) for one in self.turns):
            raise ValueError("a turn is of another rollout")
        return self


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    response: NeMoGymResponse
    observations: AgentObservationBundle

"""The meaning of the Tinker calls, by topic. Every lookup is by owner: what belongs to another owner does not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from palestra.server.tinker.copies import CheckpointCopies
from palestra.server.tinker.imports import WeightImports
from palestra.server.tinker.model_service import ModelService
from palestra.server.tinker.rest_service import RestService
from palestra.server.tinker.result_service import ResultService
from palestra.server.tinker.sampling_service import SamplingService
from palestra.server.tinker.session_service import SessionService
from palestra.server.tinker.training_service import TrainingService


@dataclass(frozen=True, slots=True)
class TinkerService:
    sessions: SessionService
    models: ModelService
    training: TrainingService
    sampling: SamplingService
    results: ResultService
    rest: RestService
    copies: CheckpointCopies
    imports: WeightImports


async def _service(request: Request) -> TinkerService:
    """Async, because a plain function would cost a trip through the thread pool."""
    return request.app.state.tinker


ServiceNow = Annotated[TinkerService, Depends(_service)]

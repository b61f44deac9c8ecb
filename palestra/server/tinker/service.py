"""The meaning of the Tinker calls, by topic. Every lookup is by owner: what belongs to another owner does not exist.

Owns: the parts. Never touches: HTTP, order and durability (`core.training`), workers.
"""

from __future__ import annotations

from palestra.server.core.core import Core
from palestra.server.core.lookup import Lookup
from palestra.server.core.samples.samplers import SamplingSessions
from palestra.server.tinker.model_service import ModelService
from palestra.server.tinker.result_service import ResultService
from palestra.server.tinker.sampling_service import SamplingService
from palestra.server.tinker.session_service import SessionService
from palestra.server.tinker.weights_service import WeightsService


class TinkerService:
    def __init__(self, core: Core, lookup: Lookup, samplers: SamplingSessions):
        self.sessions = SessionService(core)
        self.models = ModelService(core, lookup)
        self.weights = WeightsService(core, lookup, samplers)
        self.sampling = SamplingService(core, lookup, samplers)
        self.results = ResultService(core)

"""A sum per session: written as NeMo Gym's tutorials show it."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.reward_profile import compute_pass_majority_metrics, highest_k_metrics
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, Field


class TallyConfig(BaseResourcesServerConfig):
    REVERIFY_MODE = ReverifyMode.UNSUPPORTED

    start: int


class TallySeedRequest(BaseSeedSessionRequest):
    bonus: int = 0


class TallyRunRequest(BaseRunRequest):
    expected: int


class TallyVerifyRequest(TallyRunRequest, BaseVerifyRequest):
    pass


class TallyVerifyResponse(BaseVerifyResponse):
    total: int
    tools: list[str]


class AddRequest(BaseModel):
    amount: int


class AddResponse(BaseModel):
    total: int


class Tally(SimpleResourcesServer):
    config: TallyConfig
    totals: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: TallySeedRequest) -> BaseSeedSessionResponse:
        self.totals[request.session[SESSION_ID_KEY]] = self.config.start + body.bonus
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: AddRequest) -> AddResponse:
        """Add an amount to the sum."""
        session_id = request.session[SESSION_ID_KEY]
        if session_id not in self.totals:
            raise HTTPException(status_code=409, detail="this session was not seeded")
        if body.amount == 666:
            raise RuntimeError("the number of the beast")
        self.totals[session_id] += body.amount
        return AddResponse(total=self.totals[session_id])

    async def verify(self, request: Request, body: TallyVerifyRequest) -> TallyVerifyResponse:
        total = self.totals.pop(request.session[SESSION_ID_KEY], 0)
        tools = [item.name for item in body.response.output if item.type == "function_call"]
        return TallyVerifyResponse(
            **body.model_dump(), reward=float(total == body.expected), total=total, tools=sorted(set(tools))
        )

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return compute_pass_majority_metrics(tasks, answer_key="total")[0]

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        return highest_k_metrics(agent_metrics, "pass@{k}", score_names=["accuracy"])


if __name__ == "__main__":
    Tally.run_webserver()

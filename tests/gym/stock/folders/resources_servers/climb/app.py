"""Steps up to the top, in the manner of gymnasium: reset and step instead of seed and verify."""

from typing import Any

from fastapi import FastAPI, Request
from nemo_gym import BaseResourcesServerConfig, BaseVerifyResponse, NeMoGymResponse, SimpleResourcesServer
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field


class Reset(BaseModel):
    model_config = ConfigDict(extra="allow")

    height: int


class Step(Reset):
    response: NeMoGymResponse


class Climb(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    heights: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        return app

    async def reset(self, request: Request, body: Reset) -> dict[str, Any]:
        self.heights[request.session[SESSION_ID_KEY]] = 0
        return {"observation": "you stand at 0", "info": {}}

    async def step(self, request: Request, body: Step) -> dict[str, Any]:
        session_id = request.session[SESSION_ID_KEY]
        self.heights[session_id] += body.response.output_text.count("up")
        at = self.heights[session_id]
        return {"observation": f"you stand at {at}", "reward": 0.5, "terminated": at >= body.height, "info": {"at": at}}

    async def verify(self, body: Any) -> BaseVerifyResponse:
        raise NotImplementedError


if __name__ == "__main__":
    Climb.run_webserver()

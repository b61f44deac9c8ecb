"""An agent that asks the model once, and has what it said judged in capitals."""

from fastapi import Body, Request, Response
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, is_nemo_gym_fastapi_entrypoint, raise_for_status
from pydantic import ConfigDict


class LoudConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class LoudRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class LoudVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class LoudVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class LoudAgent(SimpleResponsesAPIAgent):
    config: LoudConfig

    async def responses(
        self,
        request: Request,
        response: Response,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008
    ) -> NeMoGymResponse:
        answer = await self.server_client.post(
            server_name=self.config.model_server.name,
            url_path=self.url_path_for_request("/v1/responses", request),
            json=body,
            cookies=request.cookies,
        )
        await raise_for_status(answer)
        said = NeMoGymResponse.model_validate(await get_response_json(answer))
        for item in said.output:
            if item.type == "message":
                item.content[0].text = item.content[0].text.upper()
        for name, cookie in answer.cookies.items():
            response.set_cookie(name, cookie.value)
        return said

    async def run(self, request: Request, body: LoudRunRequest) -> LoudVerifyResponse:
        own, resources = self.config.name, self.config.resources_server.name
        seeded = await self.server_client.post(
            server_name=resources, url_path="/seed_session", json=body.model_dump(), cookies=request.cookies
        )
        await raise_for_status(seeded)
        played = await self.server_client.post(
            server_name=own,
            url_path=self.url_path_for_run("/v1/responses", body),
            json=body.responses_create_params,
            cookies=seeded.cookies,
        )
        await raise_for_status(played)
        judged = LoudVerifyRequest.model_validate({**body.model_dump(), "response": await get_response_json(played)})
        verified = await self.server_client.post(
            server_name=resources, url_path="/verify", json=judged.model_dump(), cookies=played.cookies
        )
        await raise_for_status(verified)
        return LoudVerifyResponse.model_validate(await get_response_json(verified))


if __name__ == "__main__":
    LoudAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = LoudAgent.run_webserver()

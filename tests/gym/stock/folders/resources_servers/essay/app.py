"""Texts that another model judges."""

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import ModelServerRef
from nemo_gym.judge import call_judge
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)


class EssayConfig(BaseResourcesServerConfig):
    judge_model_server: ModelServerRef
    absent_judge: ModelServerRef


class EssayVerifyRequest(BaseVerifyRequest):
    is_judge_there: bool = True


class Essay(SimpleResourcesServer):
    config: EssayConfig

    async def verify(self, body: EssayVerifyRequest) -> BaseVerifyResponse:
        judge = self.config.judge_model_server if body.is_judge_there else self.config.absent_judge
        question = NeMoGymEasyInputMessage(role="user", content=f"judge: {body.response.output_text}")
        verdict = await call_judge(
            self.server_client,
            server_name=judge.name,
            url_path="/v1/responses",
            json=NeMoGymResponseCreateParamsNonStreaming(input=[question]),
            response_model=NeMoGymResponse,
        )
        return BaseVerifyResponse(**body.model_dump(), reward=float("GOOD" in verdict.output_text))


if __name__ == "__main__":
    Essay.run_webserver()

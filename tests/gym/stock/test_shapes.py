"""What else servers import: conversions for model servers, sandboxes of other packages, prompts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from palestra.gym.nemo_gym_compat import COMPAT

IDS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COMPAT))
        yield


def test_a_conversation_goes_to_chat_and_comes_back_as_a_response() -> None:
    from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.responses_converter import ResponsesConverter

    converter = ResponsesConverter(return_token_id_information=True)
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "status": "completed"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", **IDS},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    tool = {"type": "function", "name": "add", "parameters": {}, "strict": True}
    params = NeMoGymResponseCreateParamsNonStreaming.model_validate(
        {"input": items, "instructions": "Be short.", "tools": [tool], "max_output_tokens": 7}
    )
    chat = converter.responses_to_chat_completion_create_params(params).model_dump(exclude_unset=True)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be short.\n\nBe kind."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [call], **IDS},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    assert chat["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert chat["max_tokens"] == 7

    message = {"role": "assistant", "content": "<think>so</think>four", **IDS}
    choice = {"index": 0, "finish_reason": "length", "message": message}
    answered = NeMoGymChatCompletion.model_validate(
        {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    )
    response = converter.chat_completion_to_response(params, answered).model_dump()
    thought, said = response["output"]
    assert thought["summary"][0]["text"] == "so"
    assert said["content"][0]["text"] == "four"
    assert {name: said[name] for name in IDS} == IDS
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_what_has_no_form_in_chat_is_refused() -> None:
    from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.responses_converter import ResponsesConverter

    params = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": [{"type": "web_search_call", "id": "w"}]})
    with pytest.raises(NotImplementedError, match="web_search_call"):
        ResponsesConverter(return_token_id_information=False).responses_to_chat_completion_create_params(params)


def test_what_every_agents_config_has_and_what_its_class_may_say() -> None:
    from nemo_gym import BaseResponsesAPIAgentConfig, BaseServerConfig, ServerClient, SimpleResponsesAPIAgent

    class Quiet(SimpleResponsesAPIAgent):
        ray_enabled = False

        async def responses(self, body: Any) -> Any: ...

        async def run(self, body: Any) -> Any: ...

    config = BaseResponsesAPIAgentConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="quiet")
    assert (config.skip_verification, config.skip_verification_reward, config.tool_accesses) == (False, 0.0, [])

    def path(own: bool, **capture: bool) -> str:
        gym = OmegaConf.create({"token_id_capture": capture})
        client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=gym)
        agent = Quiet(config=config.model_copy(update={"token_id_capture": own}), server_client=client)
        return agent.url_path_for_run("/v1/responses", {"_ng_task_index": 3, "_ng_rollout_index": 1})

    assert path(True, enabled=False) == path(False, enabled=True) == "/v1/responses"
    captured = "/ng-rollout/3-1/training-token-capture/v1/responses"
    assert path(True, enabled=True) == path(False, enabled=True, all_agents=True) == captured


def test_usage_that_one_did_not_count_nobody_counted() -> None:
    from nemo_gym.openai_utils import NeMoGymResponseUsage, accumulate_response_usage

    def usage(cached: int | None) -> Any:
        return NeMoGymResponseUsage.model_validate(
            {
                "input_tokens": 3,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": 2,
                "output_tokens_details": {"reasoning_tokens": 1},
                "total_tokens": 5,
            }
        )

    assert accumulate_response_usage(None, None) is None
    total = accumulate_response_usage(usage(None), accumulate_response_usage(usage(1), usage(1)))
    assert total is not None
    assert (total.total_tokens, total.input_tokens_details.cached_tokens) == (15, None)
    assert total.output_tokens_details.reasoning_tokens == 3


class FolderProvider:
    """A sandbox is a folder."""

    name = "folder"

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.closed: list[str] = []

    async def create(self, spec: Any) -> Any:
        from nemo_gym.sandbox import SandboxHandle

        return SandboxHandle(sandbox_id="one", provider_name=self.name, raw=None)

    async def exec(self, handle: Any, command: str, **options: Any) -> Any:
        from nemo_gym.sandbox import SandboxExecResult

        return SandboxExecResult(stdout=(self.root / command).read_text(), stderr="", return_code=0)

    async def upload_file(self, handle: Any, source_path: Path, target_path: str) -> None:
        shutil.copyfile(source_path, self.root / target_path)

    async def status(self, handle: Any) -> Any:
        from nemo_gym.sandbox import SandboxStatus

        return SandboxStatus.RUNNING

    async def serialize_handle(self, handle: Any, *, scope: str | None = None) -> dict[str, Any]:
        return {"id": handle.sandbox_id}

    async def connect(self, descriptor: Any) -> Any:
        from nemo_gym.sandbox import SandboxHandle

        return SandboxHandle(sandbox_id=descriptor["id"], provider_name=self.name, raw=None)

    async def close(self, handle: Any) -> None:
        self.closed.append(handle.sandbox_id)

    async def aclose(self) -> None:
        self.closed.append("provider")


def test_a_sandbox_lives_from_start_to_stop_with_and_without_a_loop(tmp_path: Path) -> None:
    from nemo_gym.sandbox import AsyncSandbox, Sandbox, SandboxSpec, SandboxStatus, register_provider

    register_provider("folder", FolderProvider, override=True)
    spec = SandboxSpec(files={"note": "hello"}, resources={"cpu": 2})
    with Sandbox({"folder": {"root": str(tmp_path)}}, spec).start() as sandbox:
        assert (sandbox.exec("note").stdout, sandbox.status()) == ("hello", SandboxStatus.RUNNING)
    assert sandbox.status() is SandboxStatus.STOPPED

    provider = FolderProvider(str(tmp_path))

    async def lived() -> None:
        async with AsyncSandbox(provider, spec) as other:
            with pytest.raises(RuntimeError, match="not been started"):
                await other.exec("note")
            await other.start()

    asyncio.run(lived())
    assert provider.closed == ["one", "provider"]


def test_a_sandbox_is_passed_on_and_stopped_where_its_setup_fails(tmp_path: Path) -> None:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

    provider = FolderProvider(str(tmp_path))
    spec = SandboxSpec(files={"note": "hello"}, workdir="/w", ports=(80,))

    async def fail(_: Any) -> None:
        raise RuntimeError("no setup")

    async def passed_on() -> None:
        owner = await AsyncSandbox(provider, spec).start()
        descriptor = await owner.serialize()
        assert descriptor == {"id": "one", "workdir": "/w", "ports": [80]}
        borrower = await AsyncSandbox.connect(descriptor, provider=provider)
        assert (await borrower.exec("note")).stdout == "hello"
        with pytest.raises(NotImplementedError, match="'folder' knows no services"):
            await borrower.endpoint(80)
        with pytest.raises(RuntimeError, match="no setup"):
            await AsyncSandbox(provider).start_with_setup(spec, fail)

    asyncio.run(passed_on())
    assert provider.closed == ["one", "provider"]


def test_a_sandbox_provider_that_is_not_there_is_named() -> None:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, resolve_provider_config

    with pytest.raises(ValueError, match=r"no sandbox provider 'docker' here.*nemo_gym\.sandbox_providers"):
        AsyncSandbox({"docker": {}})
    with pytest.raises(ValueError, match="not defined"):
        resolve_provider_config("sandbox", {})
    with pytest.raises(ValueError, match="unknown sandbox resources cpus"):
        SandboxSpec(resources={"cpus": 1})


def test_a_prompt_is_filled_from_a_row(tmp_path: Path) -> None:
    from nemo_gym.prompt import apply_prompt_to_row, load_prompt_config

    path = tmp_path / "prompt.yaml"
    path.write_text("system: Answer.\nuser: '{question} {{now}}'")
    config = load_prompt_config(str(path))
    filled = apply_prompt_to_row({"question": "Why?", "responses_create_params": {"temperature": 1}}, config)
    assert filled["responses_create_params"] == {
        "temperature": 1,
        "input": [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Why? {now}"}],
    }
    with pytest.raises(KeyError, match="asks for 'question', the row has answer"):
        apply_prompt_to_row({"answer": "B"}, config)

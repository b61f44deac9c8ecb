"""Settings of model servers: all that NeMo Gym's files say, nothing unknown, nothing that would be ignored."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from palestra.gym.errors import GymConfigError
from palestra.gym.models import OpenAIModel, VLLMModel
from palestra.gym.models.settings import read_capture
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.registry import load_class
from palestra.gym.search_folders import SHIPPED
from tests.gym.models.scripted import OPENAI, VLLM, model


@pytest.mark.parametrize(
    ("of", "settings", "words"),
    [
        (VLLM, {"return_token_ids_information": True}, "did you mean: return_token_id_information?"),
        (VLLM, {"zzz": 1}, "there are: api_key"),
        (VLLM, {"model": None}, "model"),
        (VLLM, {"base_url": []}, "at least one URL"),
        (VLLM, {"base_url": "localhost:8000"}, "http://127.0.0.1:8000/v1"),
        (VLLM, {"uses_reasoning_parser": "perhaps"}, "uses_reasoning_parser"),
        (VLLM, {"audio_root": "/a"}, "audio is not supported"),
        (VLLM, {"render_chat_template": True}, "unless use_completions_api"),
        (
            VLLM,
            {"use_completions_api": True, "render_chat_template": True, "tokenizer": "/not/there"},
            "is not a folder",
        ),
        (VLLM, {"use_completions_api": True, "render_chat_template": True, "tokenizer": "/"}, "render_chat_template"),
        (VLLM, {"tokenizer": "x"}, "only render_chat_template"),
        (VLLM, {"is_responses_native": True, "sequential_reasoning_allowed": False}, "is_responses_native"),
        (VLLM, {"max_concurrent_requests": 0}, "at least 1"),
        (VLLM, {"request_timeout_s": 0}, "above 0"),
        (VLLM, {"endpoint_file": "/e"}, "gym.use_stock=[vllm_model]"),
        (VLLM, {"reasoning_field": "reasoning"}, "reasoning_field: only NeMo Gym's own vllm_model"),
        (OPENAI, {"max_http_attempts": 0}, "max_attempts at least 1"),
        (OPENAI, {"openai_base": "x"}, "did you mean: openai_base_url, "),
        (OPENAI, {"openai_base_url": "x"}, "is not a URL"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_say_instead(of: dict[str, Any], settings: Any, words: str) -> None:
    with pytest.raises(GymConfigError) as response:
        model(of=of, **settings)
    assert "policy_model" in str(response.value)
    assert words in str(response.value)
    assert "tml-test" not in str(response.value)  # a secret


def test_text_from_the_environment_is_read_as_what_it_means() -> None:
    openai = model(of=OPENAI, drop_input_reasoning_items="false")
    assert isinstance(openai, OpenAIModel)
    assert openai.settings.drop_input_reasoning_items is False
    vllm = model(max_concurrent_requests="8", extra_body=None)
    assert isinstance(vllm, VLLMModel)
    assert vllm.settings.max_concurrent_requests == 8


def test_settings_of_nemo_gyms_newest_configs_are_read() -> None:
    always = {"endpoint_file": None, "endpoint_stale_grace_s": 300.0, "endpoint_check_interval_s": 10.0}
    assert model(of=VLLM, **always, endpoint_connection_retries=8).settings.endpoint_file is None
    assert model(of=OPENAI, max_http_attempts=1800).settings.max_attempts == 1800


@pytest.mark.parametrize(
    ("gym", "words"),
    [
        ({"observability_enabled": True}, "model_call_capture_dir"),
        ({"observability_enabled": True, "model_call_capture_dir": "relative"}, "absolute"),
        ({"token_id_capture": {"enabled": True}}, "token_id_capture.dir"),
        ({"token_id_capture": {"enabled": True, "sink": "a:B"}}, "token_id_capture.dir instead"),
        ({"token_id_capture": {"enable": True}}, "enable"),
    ],
)
def test_a_capture_that_could_not_be_kept_is_refused_at_the_start(gym: dict[str, Any], words: str) -> None:
    with pytest.raises(GymConfigError, match=words):
        read_capture(gym)


@pytest.mark.parametrize(
    "path", sorted(SHIPPED.glob("responses_api_models/*/configs/*.yaml")), ids=lambda path: path.stem
)
def test_every_config_we_ship_makes_a_server(path: Any) -> None:
    text = (
        path.read_text()
        .replace("${policy_base_url}", "http://127.0.0.1:1/v1")
        .replace("${oc.env:POLICY_DROP_REASONING_ITEMS,false}", "false")
    )
    ((name, kinds),) = yaml.safe_load(text).items()
    ((implementation, settings),) = kinds["responses_api_models"].items()
    folder = SHIPPED / "responses_api_models" / implementation
    instance = ServerInstance(
        name=name,
        kind=ServerKind.MODEL,
        implementation=implementation,
        settings=settings,
        host="127.0.0.1",
        port=1,
        folder=folder,
    )
    made = load_class(instance)(instance, model().peers)
    assert made.routes().keys() == {"/v1/responses", "/v1/chat/completions", "/v1/messages"}

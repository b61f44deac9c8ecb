"""Settings of a model server in a gym's files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerInstance
from palestra.gym.servers.settings import check_known
from palestra.util.json_types import JsonMapping, JsonObject

S = TypeVar("S", bound="CommonSettings")
T = TypeVar("T", bound="CommonSettings | CaptureSettings")

STOCK_ONLY: JsonObject = {
    "endpoint_file": None,
    "supply_prefix_token_ids": False,
    "continue_final_assistant_message": False,
    "propagate_context_overflow_errors": False,
    "forward_request_chat_template_kwargs": False,
    "forward_session_id_as_conversation_id": False,
    "reasoning_field": "both",
}
"""Settings that only NeMo Gym's own `vllm_model` supports, with the values that mean nothing."""


class CommonSettings(Struct, frozen=True, kw_only=True):
    """Settings of every model server. The limits are our own: NeMo Gym has none."""

    max_concurrent_requests: int | None = None
    """Maximum number of calls at the endpoint at once. None: no limit."""
    request_timeout_s: float = 600.0
    """Time limit of one answer of the endpoint, from the first byte sent to the last one read."""
    max_attempts: int = 8
    """How often one call is sent if the endpoint is busy or unreachable. After a status 500 at most three times."""
    retry_wait_s: float = 0.5
    """Seconds before the second attempt; doubled with each further one."""

    def problem(self) -> str | None:
        """Returns what is wrong with the combination of these values."""
        if self.request_timeout_s <= 0 or self.max_attempts < 1 or self.retry_wait_s < 0:
            return "request_timeout_s must be above 0, max_attempts at least 1, retry_wait_s not negative"
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            return "max_concurrent_requests must be at least 1; leave it out for no bound"
        return None


class VLLMSettings(CommonSettings, frozen=True, kw_only=True):
    """`vllm_model`: chat completions of vLLM, of our own endpoint, or of anything compatible."""

    base_url: str | list[str]
    """Address of the endpoint, or a list of equivalent ones."""
    api_key: str
    """Key of the endpoint."""
    model: str
    """Name of the model at the endpoint."""
    return_token_id_information: bool
    """Put token ids and log-probabilities on the last item of each answer: training needs them."""
    uses_reasoning_parser: bool
    """Whether the endpoint separates reasoning from content. False: it is an error if it does."""
    request_prompt_and_generation_token_ids: bool = True
    """Request the ids in the answer itself. Off: the prompt's ids cost a second call, as with NeMo Gym's default."""
    uses_interleaved_reasoning: bool = True
    """Send earlier reasoning back to the endpoint. False: leave it out."""
    preserve_reasoning_in_assistant_content: bool = False
    """Keep reasoning in the content, in think tags."""
    replace_developer_role_with_system: bool = False
    """Send messages of the role `developer` as `system`."""
    sequential_reasoning_allowed: bool = True
    """Whether a turn may be nothing but reasoning. False: such a turn ends the rollout."""
    is_responses_native: bool = False
    """Use the endpoint's `/v1/responses` instead of chat completions."""
    chat_template_kwargs: JsonObject | None = None
    """Added to each request."""
    sampling_overrides: JsonObject | None = None
    """Sampling parameters that win over every other source."""
    extra_body: JsonObject | None = None
    """Further fields added to each request."""
    default_headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers added to each request."""
    audio_root: str | None = None
    """NeMo Gym's; must be left out here, since audio is not supported."""
    use_completions_api: bool = False
    """Use `/v1/completions` with the one user message, and a system message before it, as the prompt."""
    render_chat_template: bool = False
    """With `use_completions_api`: render the chat template here."""
    tokenizer: str | None = None
    """With `render_chat_template`: the folder of the tokenizer. Default: `model`."""
    endpoint_file: str | None = None
    """Only for NeMo Gym's own `vllm_model`; must be left out here."""
    endpoint_stale_grace_s: float = 300.0
    """Goes with `endpoint_file`; accepted, without effect here."""
    endpoint_connection_retries: int | None = 8
    """Goes with `endpoint_file`; accepted, without effect here."""
    endpoint_check_interval_s: float = 10.0
    """Goes with `endpoint_file`; accepted, without effect here."""
    supply_prefix_token_ids: bool = False
    """Only for NeMo Gym's own `vllm_model`; must stay false here."""
    continue_final_assistant_message: bool = False
    """Only for NeMo Gym's own `vllm_model`; must stay false here."""
    propagate_context_overflow_errors: bool = False
    """Only for NeMo Gym's own `vllm_model`; must stay false here."""
    forward_request_chat_template_kwargs: bool = False
    """Only for NeMo Gym's own `vllm_model`; must stay false here."""
    forward_session_id_as_conversation_id: bool = False
    """Only for NeMo Gym's own `vllm_model`; must stay false here."""
    reasoning_field: str = "both"
    """Only for NeMo Gym's own `vllm_model`; must stay `both` here."""

    @property
    def urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer or self.model)

    def problem(self) -> str | None:
        for name, value in STOCK_ONLY.items():
            if getattr(self, name) != value:
                return f"{name}: only NeMo Gym's own vllm_model has this setting; try gym.use_stock=[vllm_model]"
        if self.audio_root is not None:
            return "audio_root: audio is not supported; leave it out"
        if self.render_chat_template and not self.use_completions_api:
            return "render_chat_template: the endpoint renders its template itself, unless use_completions_api: true"
        if self.render_chat_template and not self.tokenizer_folder.is_dir():
            return (
                f"render_chat_template: {str(self.tokenizer_folder)!r} is not a folder; set tokenizer: to "
                "the folder of the model's tokenizer with its chat template (nothing is downloaded)"
            )
        if self.tokenizer is not None and not self.render_chat_template:
            return "tokenizer: only render_chat_template: true uses it; leave it out"
        if self.is_responses_native and (self.use_completions_api or not self.sequential_reasoning_allowed):
            return (
                "is_responses_native cannot be combined with use_completions_api or sequential_reasoning_allowed: false"
            )
        return super().problem() or _wrong_url("base_url", self.urls)


class OpenAISettings(CommonSettings, frozen=True, kw_only=True):
    """`openai_model`: an endpoint that has the Responses API itself."""

    openai_base_url: str
    """Address of the endpoint."""
    openai_api_key: str
    """Key of the endpoint."""
    openai_model: str
    """Name of the model at the endpoint."""
    extra_body: JsonObject = field(default_factory=dict)
    """Further fields added to each request."""
    openai_default_headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers added to each request."""
    drop_input_reasoning_items: bool = False
    """Leave reasoning items out of the input, for endpoints that cannot read their own."""
    max_http_attempts: int | None = None
    """NeMo Gym's name for `max_attempts`."""

    def __post_init__(self) -> None:
        if self.max_http_attempts is not None:
            msgspec.structs.force_setattr(self, "max_attempts", self.max_http_attempts)

    def problem(self) -> str | None:
        return super().problem() or _wrong_url("openai_base_url", [self.openai_base_url])


class TokenCapture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`token_id_capture`: for agents that lose the token ids."""

    enabled: bool = False
    """Whether to capture them."""
    all_agents: bool = False
    """For all agents; false: for those that set `token_id_capture` themselves."""
    dir: str | None = None
    """An absolute path for the files of token ids."""
    sink: str | None = None
    """NeMo Gym's; must be left out here, since only files are written."""
    sink_kwargs: JsonObject | None = None
    """NeMo Gym's; must be left out here."""
    rebuild_response: bool = True
    """Put the ids back into the output of collected rollouts; false: only write the files."""
    max_mask_fraction: float | None = None
    """NeMo Gym's; accepted, without effect here."""
    mask_fraction_min_samples: int = 50
    """NeMo Gym's; accepted, without effect here."""


class CaptureSettings(Struct, frozen=True, kw_only=True):
    observability_enabled: bool = False
    """Capture every model call of a rollout, request and answer, in `model_call_capture_dir`."""
    model_call_capture_dir: str | None = None
    """An absolute path for those files."""
    token_id_capture: TokenCapture | bool | None = None
    """Capture the token ids of model calls, for agents that lose them."""

    def problem(self) -> str | None:
        if self.observability_enabled and not _is_absolute(self.model_call_capture_dir):
            return "observability_enabled: true needs model_call_capture_dir, an absolute path"
        tokens = self.tokens
        if tokens.sink is not None or tokens.sink_kwargs is not None:
            return "token_id_capture.sink: only files are supported; set token_id_capture.dir instead"
        if tokens.enabled and not _is_absolute(tokens.dir):
            return "token_id_capture.enabled: true needs token_id_capture.dir, an absolute path"
        return None

    @property
    def tokens(self) -> TokenCapture:
        return self.token_id_capture if isinstance(self.token_id_capture, TokenCapture) else TokenCapture()


def read_settings(as_: type[S], instance: ServerInstance) -> S:
    """Reads settings. Raises GymConfigError with the names of the instance and the setting."""
    check_known(instance, as_)
    given = {key: value for key, value in instance.settings.items() if value is not None}
    return _checked(as_, given, instance.where)


def read_capture(gym: JsonMapping) -> CaptureSettings:
    """Reads the capture settings of a whole gym."""
    known = {one.name for one in msgspec.structs.fields(CaptureSettings)}
    return _checked(CaptureSettings, {key: gym[key] for key in known if gym.get(key) is not None}, "the gym")


def _checked(as_: type[T], own: JsonMapping, where: str) -> T:
    try:
        settings = msgspec.convert(own, as_, strict=False)  # environment variables are text: "false", "8"
    except msgspec.ValidationError as e:
        raise GymConfigError(f"{where}: {e}") from None
    problem = settings.problem()
    if problem is not None:
        raise GymConfigError(f"{where}: {problem}")
    return settings


def _wrong_url(key: str, urls: list[str]) -> str | None:
    if not urls:
        return f"{key} is an empty list; name at least one URL"
    for url in urls:
        if not url.startswith(("http://", "https://")):
            return f"{key}: {url!r} is not a URL; write it in full, such as http://127.0.0.1:8000/v1"
    return None


def _is_absolute(path: str | None) -> bool:
    return path is not None and Path(path).is_absolute()

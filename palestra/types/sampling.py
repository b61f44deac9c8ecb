"""Sampling requests and their results: plain records, no tensors."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from palestra.types.pictures import Picture, PlacedImage
from palestra.types.training import RoutedExperts, TensorData


class StopReason(StrEnum):
    """Why a sampled sequence ended."""

    STOP = "stop"
    """A stop token or stop string ended the sequence; it is part of the tokens."""
    LENGTH = "length"
    """`max_tokens` or the context ended it."""
    ABORT = "abort"


SEEDS = 1 << 63  # all that Tinker's signed 64 bits hold, without those below 0, which other servers refuse
SEED_STEP = 0x9E3779B97F4A7C15 % SEEDS  # odd, with well-mixed bits: neighbouring seeds have no samples in common


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of a request for one sample that draws what sample `index` draws in a request with `seed`."""
    return (seed + index * SEED_STEP) % SEEDS


class GrammarKind(StrEnum):
    """How the text of a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """The text is a JSON schema; of any object: `{"type": "object"}`."""
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect: added tokens by name or id, `%json {…}` for schemas. Or GBNF: it has no rule `start`."""


MAX_TEMPERATURE = 100.0  # nearly every token is then as likely as any other; more can only be a mistake
"""The highest sampling temperature."""
MAX_GRAMMAR = 1 << 18  # characters; more than twice what OpenAI takes
"""The most characters that a grammar may have."""


class Grammar(Struct, frozen=True, kw_only=True):
    """What may be drawn, apart from the tokens that end a turn."""

    kind: GrammarKind
    text: str
    around: str = ""
    """A Lark grammar around `text`, which it names `@answer`. Empty: `text` is the whole grammar."""
    is_wide: bool = False
    """A Lark grammar that is put together from schemas, and may branch as widely as they do."""
    asked_by: str = ""
    """The request field that the grammar comes from, for error messages."""

    def refusal(self, detail: str) -> str:
        return f"{self.asked_by}: {detail}" if self.asked_by else detail


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How tokens are drawn, and when a sequence ends."""

    max_tokens: int | None = None
    """None: until something stops it or the context is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 (or 0): off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    """None: the model's end-of-sequence ids. Empty: no token stops it."""
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop token may be drawn before this many tokens."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}


class SampleRequest(Struct, frozen=True, kw_only=True):
    """A request for one or several samples of one prompt."""

    prompt: tuple[int, ...]
    """Token ids. Where `images` stand, any ids will do."""
    images: tuple[PlacedImage, ...] = ()
    """Places of pictures in the prompt."""
    pictures: tuple[Picture, ...] = ()
    """Each of these pictures once."""
    params: SamplingParams = SamplingParams()
    num_samples: int = 1
    cache_salt: str = ""
    """The KV cache is shared only between requests with the same salt, so that no caller learns from it what others
    asked."""
    grammar: Grammar | None = None
    topk_logprobs: int = 0
    raw_logprobs: bool = False
    """Log-probabilities by the unscaled model beside those at `temperature`; the top-k are then the unscaled ones."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Only the last n prompt tokens get theirs (and their top-k); what comes before may be read from the cache."""
    target_prompt_logprobs: TensorData | None = None
    """int64 [len(prompt) - 1, K], dense or CSR: ids to score in place of prompt token i + 1. -1 and unlisted: none."""
    prompt_alt_tokens_k: int = 0
    """Tokens to draw in place of each prompt token but the first: with replacement, at `temperature`, unfiltered."""
    record_routing: bool = False
    """Return which experts each position visited. Models without experts have nothing to return."""


class TopLogprobs(Struct, frozen=True):
    """The k likeliest tokens at one position, likeliest first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class WeightsChange(Struct, frozen=True):
    """Where a sequence went on with other weights while it was sampled."""

    start: int
    """The first token that they drew."""
    weights: str
    """Their name: that of a frozen sampler."""
    is_exact: bool = True
    """Whether keys and values before it were computed anew, so that its log-probabilities are those of these weights
    alone."""


class VersionSegment(Struct, frozen=True):
    """Tokens of a sequence that weights of one version drew: from `start` to the next segment."""

    start: int
    version: int
    is_exact: bool = True
    """False: some of the keys and values that they saw are those of older weights."""


class SampledSequence(Struct, kw_only=True):
    """One sampled sequence with the log-probabilities of its tokens."""

    tokens: list[int]
    logprobs: list[float]
    """One per token, under the distribution it was drawn from (before top-k/top-p)."""
    stop_reason: StopReason
    raw_logprobs: list[float] = []
    """Log-probabilities of the unscaled model, where the request asked for them."""
    topk_logprobs: list[TopLogprobs] = []
    routing: RoutedExperts | None = None
    """The experts of all positions of prompt and tokens but the last, which was never an input; where asked for."""
    sequence_id: str = ""
    """Name of the sequence at a Tinker server, for its clients."""
    changes: list[WeightsChange] = []
    """Empty: the weights that the request named drew all of it."""
    segments: list[VersionSegment] = []
    """The same with versions in place of names, for the client that knows these; the first one begins at 0."""


class SampleResult(Struct, kw_only=True, tag="sample_result"):
    """The result of a sampling request."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token, by the unscaled model; the first is None: nothing predicts it."""
    topk_prompt_logprobs: list[TopLogprobs | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    """float32, in shape and layout of the request's; 0.0 where that has -1."""
    prompt_alt_tokens: TensorData | None = None
    """int64 [len(prompt) - 1, k], dense. Row i was drawn where prompt token i + 1 stands."""
    prompt_alt_logprobs: TensorData | None = None
    """float32 of the same shape: the log-probabilities of these tokens at their positions."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were already in the cache."""

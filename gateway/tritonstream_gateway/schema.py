"""What callers may send: OpenAI's fields and vLLM's, as pydantic models. Read by translate.py and openapi.py.

Types are checked here; bounds, and whether the model can do it, are the client library's and the server's to say, for
they say it to gRPC callers too. A field that is not here is ignored, and the reply's header names it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

IGNORED_HEADER = "x-ignored-fields"
# OpenAI's own fields that say nothing to a model: they are taken in silence.
SILENT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

Tokens = Annotated[list[int], Field(max_length=4_096)]
Texts = Annotated[list[str], Field(max_length=4_096)]


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    include_usage: bool | None = Field(None, description="End with a chunk that holds the whole request's usage.")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")


class Asked(BaseModel):
    """What a chat and a completion have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A served model or an alias; the only one, where none is named.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Tokens | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids, as texts, to what their logit gains.")
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    clean_up_tokenization_spaces: bool | None = Field(None, description="False is what is done; true is ignored.")
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structured_outputs: dict[str, Any] | None = Field(None, description="vLLM's: json, regex, choice or grammar.")
    priority: int | None = Field(None, description="Lower is sooner; needs a server that schedules by priority.")
    cache_salt: str | None = None
    stream_interval: int | None = Field(None, description="A chunk for every so many tokens.")
    user: str | None = None

    def ignored(self) -> list[str]:
        """Name the fields that will have no effect."""
        extra = [name for name, value in (self.model_extra or {}).items() if value is not None and name not in SILENT]
        return sorted(extra + (["clean_up_tokenization_spaces"] if self.clean_up_tokenization_spaces else []))


class ChatRequest(Asked):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(
        min_length=1,
        description="Each has a role (system, user, assistant, tool) and a content: a text, or text parts.",
    )
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens; it wins.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    enable_thinking: bool | None = Field(None, description="Short for chat_template_kwargs.enable_thinking.")
    return_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the reply.")
    include_reasoning: bool | None = Field(None, description="vLLM's name of return_reasoning.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that know documents.")


class CompletionRequest(Asked):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        description="A text to go on with, or several, each answered by itself."
    )
    logprobs: int | None = Field(None, description="How many alternatives to report for every token.")
    echo: bool | None = Field(None, description="Put the prompt before its answer.")
    suffix: str | None = Field(None, description="Not supported: anything but an empty text is refused.")
    response_format: dict[str, Any] | None = Field(None, description="Only type text; use structured_outputs.")


class FunctionCall(BaseModel):
    """The function of a tool call; its arguments are JSON as the model wrote it."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool; in a stream, a piece of one."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that came from the prefix cache."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the answer's tokens, those of its reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens spent."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatMessage(BaseModel):
    """The answer; its reasoning stands under vLLM's name and under the ecosystem's."""

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(BaseModel):
    """The reply to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One of the answers."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletion(BaseModel):
    """The reply to a completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(BaseModel):
    """One model; `root` is the name behind an alias."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str


class ModelList(BaseModel):
    """All models, and the aliases."""

    object: str
    data: list[ModelCard]


class ErrorObject(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorReply(BaseModel):
    """OpenAI's error."""

    error: ErrorObject


class Health(BaseModel):
    """Whether the gateway lives, or can answer; `reason` says why not."""

    status: str
    reason: str | None = None


class Version(BaseModel):
    """The gateway's version."""

    version: str

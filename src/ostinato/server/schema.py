"""The bodies of requests: OpenAI's fields, vLLM's additions, and their ranges. Unknown fields are ignored.

Types are taken strictly ("1" is no number), ranges where they can be told from the field alone; the rest is the
engine's to check.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ostinato.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS

MAX_ANSWERS = 128
"""Largest `n`, and most prompts of one completion request (OpenAI's limits)."""

MAX_STOPS = 16

MAX_TOOLS = 128
"""OpenAI's limit."""

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1)]
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
"""Of functions and schemas (OpenAI's rule)."""

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
"""A token id as the key of a JSON object."""


class Body(BaseModel):
    """`refused` names fields that would change the answer and are not served, with the values that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}


class StreamOptions(Body):
    include_usage: bool = False


class JsonSchema(Body):
    """What OpenAI calls a JSON schema: one with a name. `strict` changes nothing: answers always fit the schema."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's: exactly one of these. `structural_tag` is JSON text."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class SamplingFields(Body):
    """What chat and text completions have in common. None is the default of `SamplingParams`, or of the server."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "guided_whitespace_pattern": (None,),
        "use_beam_search": (None, False),
        "logits_processors": (None, []),
        "prompt_logprobs": (None,),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class Message(BaseModel):
    """`role` and `content`, and what else the chat template knows. Content is text, or parts of which each is text."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: str | list[dict[str, Any]] | None = None


class FunctionDefinition(Body):
    """`strict` changes nothing: arguments always fit `parameters`, a JSON schema; without one there are none."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = SamplingFields.refused | {
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
        "documents": (None, []),
        "chat_template": (None,),
        "continue_final_message": (None, False),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = SamplingFields.refused | {
        "suffix": (None, ""),
        "best_of": (None, 1),
    }

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_ANSWERS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_ANSWERS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"chat_template": (None,)}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]

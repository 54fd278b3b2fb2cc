"""What a chat's answer says, taken apart: reasoning, text and calls of tools, by vLLM's own parsers.

Read by engine.py. A request that neither thinks nor has tools to call has no reader at all, and costs nothing here.
Otherwise each choice has a parser of its own, which takes every delta on the engine's thread. What a whole answer says
is what vLLM's server says of it: it parses that at once, and spells the arguments of a call anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser, make_tool_call_id
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from .errors import InvalidRequest, ServingError

TOOL_CALL_PARSER, REASONING_PARSER = "tool_call_parser", "reasoning_parser"
# 0.26 drops what a reasoning parser holds back at the end of the reasoning, unless a tool parser takes it.
_ALONE = hasattr(Parser, "count_reasoning_tokens")


@dataclass(slots=True)
class Said:
    """What one choice said: in a delta, or in all."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0


class Parsers:
    """The parsers of one model."""

    def __init__(self, tool_parser: str, reasoning_parser: str, model_config: Any, tokenizer: Any) -> None:
        """Find them by vLLM's names; "" is none. Raises ServingError where the model's tokenizer does not suit one."""
        self.calls_tools, self.reads_reasoning = bool(tool_parser), bool(reasoning_parser)
        self._model_config = model_config
        self._tokenizer = tokenizer
        model = {"enable_auto_tools": True, "model_name": model_config.model}
        self._both = ParserManager.get_parser(tool_parser or None, reasoning_parser or None, **model)
        self._tools = ParserManager.get_parser(tool_parser or None, None, **model)
        self._reasoning = ParserManager.get_parser(None, reasoning_parser or None, **model) if _ALONE else self._both
        if self._both is not None:
            try:
                self._both(tokenizer, model_config=model_config)
            except Exception as error:  # each parser has its own way to miss its tokens
                raise ServingError(
                    f"{TOOL_CALL_PARSER}={tool_parser!r} and {REASONING_PARSER}={reasoning_parser!r} cannot read what "
                    f"{model_config.model} says: {error}"
                ) from error

    def reader(self, asked: Any, template_kwargs: dict[str, Any], prompt_ids: list[int]) -> Reader | None:
        """Return what reads the answer to vLLM's chat request, which is adjusted to that; None where nothing has to be.

        Raises InvalidRequest for tools where the model has no parser for their calls.
        """
        calls = asked.tools is not None and asked.tool_choice != "none"
        if calls and not self.calls_tools:
            raise InvalidRequest(f"chat.tools: no {TOOL_CALL_PARSER} is set for this model, so it cannot call tools")
        kind = self._both if calls else self._reasoning
        if kind is None:
            return None

        def make(kind: Any) -> Any:
            return kind(
                self._tokenizer, asked.tools, chat_template_kwargs=template_kwargs, model_config=self._model_config
            )

        parser = make(kind)
        turn = self._last_turn(prompt_ids)
        thinks = parser.reasoning_parser is not None and not parser.is_reasoning_end(turn)
        if not thinks and not calls:
            return None
        parser.adjust_request(asked)
        return Reader(asked, make, kind if thinks else self._tools, parser if thinks else None, turn)

    def _last_turn(self, prompt_ids: list[int]) -> list[int]:
        """What follows the last end of a turn: 0.26 takes a thought that ended in an earlier turn for this one's."""
        end = self._tokenizer.eos_token_id
        for position in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[position] == end:
                return prompt_ids[position + 1 :]
        return prompt_ids


class Reader:
    """Reads the answer to one request, choice by choice."""

    def __init__(self, asked: Any, make: Any, kind: Any, first: Any, turn: list[int]) -> None:
        self.asked = asked
        self.starts_thinking = first is not None
        self._make = make
        self._kind = kind
        self._turn = turn
        self._spare = first
        self._choices: dict[int, _Choice] = {}
        self._named = not isinstance(asked.tool_choice, str | None)

    def read(self, index: int, text: str, token_ids: list[int], finish_reason: str | None) -> Said:
        """Read what one choice gained since it was read before. This is the hot path: it runs once per token."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._parser())
        choice.token_ids += token_ids
        said = Said(finish_reason=finish_reason)
        found = choice.parser.parse_delta(
            text, token_ids, self.asked, prompt_token_ids=self._turn, finished=finish_reason is not None
        )
        if found is not None:
            said.text, said.reasoning = found.content or "", found.reasoning or ""
            calls = found.tool_calls
            if calls and self.asked.parallel_tool_calls is False:
                calls = [call for call in calls if call.index == 0]
            if calls:
                said.tool_calls = [call.model_dump(exclude_none=True) for call in calls]
                choice.called = True
        if finish_reason is not None:
            said.num_reasoning_tokens = self._thought(choice.token_ids)
            if finish_reason == "stop" and choice.called and not self._named:
                said.finish_reason = "tool_calls"
        return said

    def read_whole(self, index: int, text: str, token_ids: list[int], finish_reason: str | None) -> Said:
        """Read all that one choice said, at once."""
        parser = self._parser()
        reasoning, content, calls = parser.parse(
            text, self.asked, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        if self.asked.tool_choice == "none":
            calls = None
        if calls and self.asked.parallel_tool_calls is False:
            calls = calls[:1]
        said = Said(text=content or "", finish_reason=finish_reason)
        said.reasoning = (reasoning or "") if self.asked.include_reasoning else ""
        said.num_reasoning_tokens = self._thought(token_ids)
        if calls:
            said.tool_calls = [_spelled(position, call) for position, call in enumerate(calls)]
        required = self.asked.tool_choice == "required"
        if (calls and not self._named and not required) or (required and finish_reason == "stop"):
            said.finish_reason = "tool_calls"
        return said

    def _thought(self, token_ids: list[int]) -> int:
        """Count the tokens of the reasoning, by a parser that saw nothing yet: one that streamed counts too few."""
        if not self.starts_thinking or not _ALONE:
            return 0
        return int(self._make(self._kind).count_reasoning_tokens(token_ids))

    def _parser(self) -> Any:
        parser, self._spare = self._spare, None
        return parser if parser is not None else self._make(self._kind)


class _Choice:
    """One choice that is being read."""

    __slots__ = ("called", "parser", "token_ids")

    def __init__(self, parser: Any) -> None:
        self.parser = parser
        self.token_ids: list[int] = []
        self.called = False


def _spelled(position: int, call: Any) -> dict[str, Any]:
    """A whole call in the shape of a delta that says all of it."""
    return {
        "index": position,
        "id": call.id or make_tool_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Refuse a parser that vLLM does not have, before anything is loaded. Raises ServingError, naming those it has."""
    for what, name, manager in (
        (TOOL_CALL_PARSER, tool_parser, ToolParserManager),
        (REASONING_PARSER, reasoning_parser, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name and name not in known:
            raise ServingError(f"{what}={name} is none of vLLM's parsers: {', '.join(sorted(known))}")

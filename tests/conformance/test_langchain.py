"""LangChain's ChatOpenAI against the gateway, as an application uses it; and ours, which shows the reasoning."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from tritonstream.langchain import ChatTritonstream

from tests.support.servers import TINY
from tests.support.tiny_qwen3 import case
from tools.gateway import GatewayProcess

CAPITAL = case("capital")
QUESTION, WEATHER = CAPITAL.messages[0]["content"], "What is the weather in Paris?"


one_loop = pytest.mark.asyncio(loop_scope="module")  # LangChain keeps one asynchronous HTTP client for all


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def made(front: GatewayProcess, kind: type[ChatOpenAI] = ChatOpenAI, *, think: bool = False, **more: Any) -> ChatOpenAI:
    """A chat model as LangChain's documentation makes it."""
    return kind(
        model=TINY,
        base_url=f"{front.url}/v1",
        api_key="EMPTY",  # type: ignore[arg-type]  # pydantic makes a secret of it
        temperature=0,
        max_retries=0,
        extra_body={"enable_thinking": think},
        **more,
    )


def test_invoke_and_batch(front: GatewayProcess) -> None:
    """One question, or several, with usage and the reason to stop."""
    chat = made(front)
    answer = chat.invoke(QUESTION)
    assert answer.content == CAPITAL.answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] > 20
    assert [one.content for one in chat.batch([QUESTION, case("sum").messages[0]["content"]])] == [
        CAPITAL.answer,
        case("sum").answer,
    ]


@one_loop
async def test_stream(front: GatewayProcess) -> None:
    """In pieces, blocking and not, with the usage at the end."""
    chat = made(front, stream_usage=True)
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3
    assert "".join(str(chunk.content) for chunk in chunks) == CAPITAL.answer
    assert any(chunk.usage_metadata for chunk in chunks)
    assert "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)]) == CAPITAL.answer


def test_history(front: GatewayProcess) -> None:
    """A conversation with its earlier turns."""
    memory = case("memory")
    kinds = {"user": HumanMessage, "assistant": AIMessage}
    history = [kinds[str(turn["role"])](turn["content"]) for turn in memory.messages]
    assert made(front).invoke(history).content == memory.answer


def test_tools(front: GatewayProcess) -> None:
    """bind_tools: the model calls, the tool answers, the model tells."""
    chat = made(front, think=True).bind_tools(list(case("weather").tools))
    called = chat.invoke(WEATHER)
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    gathered: Any = None
    for chunk in chat.stream(WEATHER):
        gathered = chunk if gathered is None else gathered + chunk
    assert [(one["name"], one["args"]) for one in gathered.tool_calls] == [("get_weather", {"city": "Paris"})]
    told = chat.invoke([HumanMessage(WEATHER), called, ToolMessage("18 degrees, sunny", tool_call_id=str(call["id"]))])
    assert str(told.content).strip()


def test_structured_output(front: GatewayProcess) -> None:
    """with_structured_output gives an object of the schema, by OpenAI's json_schema."""
    structured = made(front).with_structured_output(Person, method="json_schema")
    person = structured.invoke(case("json").messages[0]["content"])
    assert isinstance(person, Person)
    assert person.age == 7


@one_loop
async def test_reasoning(front: GatewayProcess) -> None:
    """ChatTritonstream shows what the model thinks, whole and streamed; ChatOpenAI has the same answer without it."""
    of = case("sum-thinking")
    question = of.messages[0]["content"]
    plain, ours = made(front, think=True), made(front, ChatTritonstream, think=True)
    assert plain.invoke(question).content == of.answer
    answer = ours.invoke(question)
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == (of.answer, of.reasoning)
    gathered: Any = None
    async for chunk in ours.astream(question):
        gathered = chunk if gathered is None else gathered + chunk
    assert (gathered.content, gathered.additional_kwargs["reasoning_content"]) == (of.answer, of.reasoning)


def test_errors_are_openais(front: GatewayProcess) -> None:
    """What the server refuses is OpenAI's BadRequestError, with the server's words."""
    with pytest.raises(Exception, match="max_tokens must be"):
        made(front, max_tokens=0).invoke(QUESTION)

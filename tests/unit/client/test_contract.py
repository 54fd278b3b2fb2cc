"""The client and the server's contract spell the wire alike."""

from __future__ import annotations

from dataclasses import fields

from tritonstream import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Request,
    Sampling,
    ServerError,
    ServerUnavailable,
    request,
    sampling,
    status,
    wire,
)

from tests.unit.client.contract import contract


def test_every_input_is_one_of_the_servers() -> None:
    """What the client may send is an input of the model, of the type it sends."""
    types = {spec.name: spec.data_type for spec in contract.INPUTS}
    for name in (wire.TEXT_INPUT, wire.CHAT, wire.SAMPLING):
        assert types[name] == "BYTES"
    flags = (*wire.RETURN_ALWAYS, *wire.RETURN_LOGPROBS, wire.RETURN_PROMPT_LOGPROBS, *wire.RETURN_COUNTS)
    for name in (wire.STREAM, wire.EXCLUDE_INPUT, *flags):
        assert types[name] == "BOOL"
    assert set(flags) <= set(contract.RETURN_FLAGS)


def test_every_output_of_the_server_can_be_read() -> None:
    """Each output that the client asks for has a reader of its type; the others are for clients of vllm_backend."""
    readers = {"BYTES": wire._read_texts, "UINT32": wire._read_uint32, "FP32": wire._read_float32}
    outputs = {spec.name: readers[spec.data_type] for spec in contract.OUTPUTS}
    assert dict(wire._READERS).items() <= outputs.items()
    flags = (*wire.RETURN_ALWAYS, *wire.RETURN_LOGPROBS, wire.RETURN_PROMPT_LOGPROBS, *wire.RETURN_COUNTS)
    unasked = {"text_output", "reasoning_output", "tool_calls", "index"}
    assert {flag.removeprefix("return_") for flag in flags} | unasked == set(wire._READERS)


def test_parameters_and_chat_fields_have_one_name() -> None:
    """Triton's request parameters and the fields of a chat are those that the server looks for."""
    assert {wire.DEADLINE_MS, wire.PRIORITY, wire.CACHE_SALT, wire.LORA_NAME} == set(contract.PARAMETERS)
    assert {wire.MESSAGES, *request._CHAT_DEFAULTS} == set(contract.CHAT_FIELDS)
    assert set(request._CHAT_DEFAULTS) <= {item.name for item in fields(Request)}


def test_sampling_knows_every_field_of_the_server() -> None:
    """No sampling parameter of the server needs `extra`, and none is offered that it would refuse."""
    assert {item.name for item in fields(Sampling)} - {"extra"} == set(contract.SAMPLING_FIELDS)


def test_bounds_are_equal() -> None:
    """A value that passes here is not refused there for a bound that both know."""
    for name in (
        "MAX_CHOICES",
        "MAX_STOP_STRINGS",
        "MAX_STOP_STRING_CHARS",
        "MAX_LIST_ITEMS",
        "INT32_MAX",
        "INT64_MAX",
    ):
        assert getattr(sampling, name) == getattr(contract, name), name
    assert request.MAX_DEADLINE_S * 1_000 == contract.MAX_DEADLINE_MS


def test_every_error_of_the_server_is_told_by_its_spelling() -> None:
    """Each class of the server's error tree arrives as the one that says whose fault it is."""
    for error, kind in (
        (contract.ServingError("x"), ServerError),
        (contract.InvalidRequest("x"), InvalidRequest),
        (contract.Unavailable("x"), ServerUnavailable),
        (contract.Cancelled("x"), Cancelled),
        (contract.DeadlineExceeded(5), DeadlineExceeded),
    ):
        understood = status.from_message(error.spelled())
        assert type(understood) is kind
        assert str(understood) == str(error)


def test_the_least_request_is_one_the_server_reads() -> None:
    """A request of nothing but a prompt has exactly the tensors that say so."""
    message = wire.encode(Request(prompt="Hi", model="m"), stream=False)
    assert [item.name for item in message.inputs] == [wire.TEXT_INPUT, wire.EXCLUDE_INPUT, *wire.RETURN_ALWAYS]
    assert all(list(item.shape) == [1] for item in message.inputs)

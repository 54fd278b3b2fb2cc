"""A completion is its deltas, joined."""

from __future__ import annotations

from tritonstream import Choice, Completion, Delta, TokenLogprob, TokenLogprobs, ToolCall, ToolCallDelta, Usage


def test_choices_are_joined_each_in_its_order() -> None:
    """Deltas of several choices may come mixed."""
    place = TokenLogprobs(TokenLogprob(1, "a", -0.1, 1))
    done = Completion.gather(
        [
            Delta(index=1, text="b", num_output_tokens=1, num_input_tokens=5),
            Delta(index=0, text="a", num_output_tokens=1, num_input_tokens=5, logprobs=(place,), num_cached_tokens=3),
            Delta(index=1, text="B", num_output_tokens=2, num_input_tokens=5, finish_reason="length"),
            Delta(
                index=0,
                text="A",
                num_output_tokens=1,
                num_input_tokens=5,
                finish_reason="stop",
                logprobs=(place,),
                cumulative_logprob=-0.2,
            ),
        ]
    )
    assert done.choices == (
        Choice(
            index=0,
            text="aA",
            finish_reason="stop",
            completion_tokens=2,
            cumulative_logprob=-0.2,
            logprobs=(place, place),
        ),
        Choice(index=1, text="bB", finish_reason="length", completion_tokens=3),
    )
    assert done.usage == Usage(prompt_tokens=5, completion_tokens=5, cached_tokens=3)
    assert done.usage.total_tokens == 10
    assert done.text == "aA"


def test_thoughts_and_calls_are_put_together() -> None:
    """The pieces of several calls may come mixed; the answer goes back to the model as a message."""
    done = Completion.gather(
        [
            Delta(index=0, text="", reasoning="Hm, "),
            Delta(index=0, text="", reasoning="so.", tool_calls=(ToolCallDelta(0, "a", "f", ""),)),
            Delta(
                index=0, text="Look", tool_calls=(ToolCallDelta(1, "b", "g", "{}"), ToolCallDelta(0, arguments='{"x"'))
            ),
            Delta(
                index=0,
                text="",
                tool_calls=(ToolCallDelta(0, arguments=": 1}"),),
                finish_reason="tool_calls",
                num_output_tokens=9,
                num_reasoning_tokens=4,
            ),
        ]
    )
    (choice,) = done.choices
    assert (choice.reasoning, choice.text) == ("Hm, so.", "Look")
    assert choice.tool_calls == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))
    assert done.usage.reasoning_tokens == 4
    assert choice.message.spelled() == {
        "role": "assistant",
        "content": "Look",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_no_delta_is_an_empty_answer() -> None:
    """A model may have nothing to say."""
    assert Completion.gather([]).text == ""

"""Sampling refuses nonsense where it is made, and leaves to the server what was not said."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from tritonstream import InvalidRequest, Sampling


def test_nothing_said_is_nothing_sent() -> None:
    """The server's defaults, which follow the model's own, stay in force."""
    assert Sampling().given() == {}


def test_zero_and_false_are_said() -> None:
    """Only None is left out."""
    assert Sampling(temperature=0, ignore_eos=False, logprobs=0).given() == {
        "temperature": 0,
        "ignore_eos": False,
        "logprobs": 0,
    }


def test_extra_fields_are_passed_on() -> None:
    """What a newer server knows can be asked for before this client knows it."""
    assert Sampling(seed=1, extra={"new_knob": [1]}).given() == {"seed": 1, "new_knob": [1]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 128, got 0"),
        ({"n": 129}, "n must be a whole number from 1 to 128, got 129"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483647, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": 1.5}, "got 1.5"),
        ({"max_tokens": "12"}, "got '12'"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 5"),
        ({"temperature": -0.1}, "temperature must be a number at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature .* got nan"),
        ({"temperature": math.inf}, "temperature .* got inf"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "top_p must be a number above 0 and at most 1, got 1.01"),
        ({"top_k": -2}, "top_k must be a whole number from -1"),
        ({"min_p": 2}, "min_p must be a number at least 0 and at most 1, got 2"),
        ({"presence_penalty": 3}, "presence_penalty must be a number at least -2 and at most 2, got 3"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, got 0"),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"logprobs": -2}, "logprobs must be a whole number from -1"),
        ({"stop": [""]}, "stop must hold texts that are not empty, got ''"),
        ({"stop": ["x"] * 65}, "stop must hold at most 64 items, got 65"),
        ({"stop": "x" * 1_025}, "stop must hold texts of at most 1024 characters, got one of 1025"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"bad_words": "damn"}, "bad_words must be a list, got 'damn'"),
        ({"stop_token_ids": [-1]}, "an item of stop_token_ids must be a whole number from 0"),
        ({"allowed_token_ids": range(5_000)}, "allowed_token_ids must hold at most 4096 items, got 5000"),
        ({"logit_bias": {"a": 1}}, "a token of logit_bias must be a whole number"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] must be a number at least -100 and at most 100, got 101"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
        ({"extra": {"seed": 1}}, "extra\\['seed'\\] has a field of its own"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    """The message names the field, the bound and the value."""
    with pytest.raises(InvalidRequest, match=message):
        Sampling(**values)


def test_it_cannot_be_changed_behind_the_check() -> None:
    """Fields are frozen, and lists are taken over as they were."""
    words = ["a"]
    sampling = Sampling(stop=words)
    words.append("")
    assert sampling.given() == {"stop": ("a",)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.n = 2  # type: ignore[misc]

"""One tree of errors, each of which says whose fault it is."""

from __future__ import annotations

import pickle

import pytest
import tritonstream
from tritonstream import DeadlineExceeded, ServerUnavailable, TritonstreamError


def test_every_error_is_in_the_tree_and_exported() -> None:
    """One except clause catches all, and each class says who has to act."""
    for kind in TritonstreamError.__subclasses__():
        assert getattr(tritonstream, kind.__name__) is kind
        assert kind("x").blame in ("caller", "server", "network")


def test_only_an_unavailable_server_is_worth_another_try() -> None:
    """What may succeed later without a change is said by the class."""
    assert [kind.__name__ for kind in TritonstreamError.__subclasses__() if kind.retryable] == ["ServerUnavailable"]


@pytest.mark.parametrize("error", [ServerUnavailable("gone", blame="network"), DeadlineExceeded("late")])
def test_errors_cross_processes(error: TritonstreamError) -> None:
    """Pickling keeps the message and the blame."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.blame) == (type(error), str(error), error.blame)

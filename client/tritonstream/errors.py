"""The one error tree, in which every class says whose fault it is and whether to try again.

Raised by every other module and by nothing else: gRPC's own exceptions are mapped in status.py, and the original is
kept as `__cause__`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Blame = Literal["caller", "server", "network"]


class TritonstreamError(Exception):
    """Whatever goes wrong between this client and an answer.

    `blame` says who has to act: the "caller" changes the request, the "server" is looked after by its operator, the
    "network" is what lies between. `retryable` says that the same request may succeed later without a change.
    """

    blame: Blame = "server"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, blame: Blame | None = None) -> None:
        super().__init__(message)
        if blame is not None:
            self.blame = blame


class InvalidRequest(TritonstreamError):
    """The caller must change the request, or the settings of the client; the message names the field and its bound."""

    blame: Blame = "caller"


class ModelNotFound(TritonstreamError):
    """The server has no model, or no version of it, by the name that was asked for."""

    blame: Blame = "caller"


class ServerUnavailable(TritonstreamError):
    """Nobody can answer now: the server is unreachable ("network"), or it is starting, stopping or full ("server")."""

    retryable: ClassVar[bool] = True


class DeadlineExceeded(TritonstreamError):
    """The request's deadline passed before the answer was complete.

    `blame` is "server" when the server said so, and "network" when nothing was heard of it until then.
    """


class Cancelled(TritonstreamError):
    """The answer was given up before it was complete, by this side ("caller") or by the other ("server")."""

    blame: Blame = "caller"


class ServerError(TritonstreamError):
    """The server failed, or said what cannot be understood."""

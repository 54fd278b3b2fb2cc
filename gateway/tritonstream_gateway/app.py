"""The ASGI application of one worker: which endpoint a request is for, and the one place where its story ends.

Made by worker.py, run by uvicorn. Every request gets exactly one reply, is counted once and logged once; prompts and
answers are not logged.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from tritonstream_gateway import errors, metrics
from tritonstream_gateway.caller import Caller, Left, Receive, Scope, Send
from tritonstream_gateway.errors import Failure
from tritonstream_gateway.routes import Gateway
from tritonstream_gateway.settings import Settings

log = logging.getLogger("tritonstream_gateway")

MODELS = "/v1/models/"
OTHER = "other"  # the label of what is no endpoint
LEFT = 499  # nginx's status of a caller who did not wait; nobody sees it but the metrics


class App:
    """Finds the endpoint, and answers what goes wrong in it."""

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        self._gateway = gateway
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        caller = Caller(scope, receive, send)
        route = MODELS + "{model}" if caller.path.startswith(MODELS) else caller.path
        if route not in self._gateway.routes and not route.startswith(MODELS):
            route = OTHER
        in_flight = metrics.in_flight.labels(route)
        in_flight.inc()
        try:
            await self._dispatch(caller)
        except Left:
            caller.status = LEFT
            metrics.left.labels(route).inc()
        except Exception as error:
            await self._fail(caller, error)
        finally:
            in_flight.dec()
            self._account(caller, route)

    async def _dispatch(self, caller: Caller) -> None:
        if caller.path.startswith(MODELS):
            if caller.method != "GET":
                raise _wrong_method("GET")
            await self._gateway.model(caller, caller.path.removeprefix(MODELS))
            return
        found = self._gateway.routes.get(caller.path)
        if found is None:
            raise Failure(status=404, message=f"there is no {caller.path:.100}", code="not_found", reason="not_found")
        method, route = found
        if caller.method != method:
            raise _wrong_method(method)
        await route(caller)

    async def _fail(self, caller: Caller, error: Exception) -> None:
        failure = errors.failure(error)
        if failure.status == 500:
            log.error("%s %s failed: %s", caller.method, caller.path, error, exc_info=error)
        metrics.rejected.labels(failure.reason).inc()
        if not caller.begun:
            await caller.fail(failure)

    def _account(self, caller: Caller, route: str) -> None:
        seconds = time.monotonic() - caller.began
        metrics.requests.labels(route, str(caller.status)).inc()
        metrics.duration.labels(route).observe(seconds)
        if caller.first_token_after is not None:
            metrics.first_token.labels(route).observe(caller.first_token_after)
        if self._settings.log_requests:
            key = f" key={caller.key}" if caller.key else ""
            log.info(
                "%s %s %d %.0f ms %d tokens%s %s",
                caller.method,
                route,
                caller.status,
                seconds * 1e3,
                caller.tokens,
                key,
                caller.reply_headers.get("x-request-id", ""),
            )


def build(gateway: Gateway, settings: Settings) -> Any:
    """Make the application, with CORS where origins are given."""
    app = App(gateway, settings)
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["x-request-id", "x-ignored-fields", "retry-after"],
    )


def _wrong_method(right: str) -> Failure:
    return Failure(
        status=405,
        message=f"this endpoint takes {right}",
        code="method_not_allowed",
        reason="not_found",
        headers={"allow": right},
    )

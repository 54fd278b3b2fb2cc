"""The OpenAPI document, made of the models that requests are read with; and a page of it that needs no other server."""

from __future__ import annotations

import html
from typing import Any

from msgspec import json
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tritonstream_gateway import schema
from tritonstream_gateway.version import VERSION

_REFERENCE = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (
    schema.ChatRequest,
    schema.CompletionRequest,
    schema.ChatCompletion,
    schema.TextCompletion,
    schema.ModelList,
    schema.ModelCard,
    schema.ErrorReply,
    schema.Health,
    schema.Version,
)
_ERRORS = {
    400: "The request must be changed; the message names the field, its value and its bound.",
    401: "The API key is missing or wrong.",
    404: "The model, or the path, is not there.",
    408: "The body, or the answer, was not complete in time.",
    413: "The body is too large.",
    429: "The key asks for more than it may; Retry-After says when to come again.",
    500: "The server failed.",
    503: "Nobody can answer now; Retry-After says when to come again.",
}


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}


def _failures(*statuses: int) -> dict[str, Any]:
    return {str(one): {"description": _ERRORS[one], "content": _json_of(schema.ErrorReply)} for one in statuses}


def _asking(summary: str, body: type[BaseModel], reply: type[BaseModel]) -> dict[str, Any]:
    content = _json_of(reply) | {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "post": {
            "summary": summary,
            "description": f"Fields that have no effect are named in the reply's header {schema.IGNORED_HEADER}.",
            "requestBody": {"required": True, "content": _json_of(body)},
            "security": [{}, {"key": []}],
            "responses": {"200": {"description": "The answer; with stream: true, events.", "content": content}}
            | _failures(400, 401, 404, 408, 413, 429, 500, 503),
        }
    }


def _reading(summary: str, reply: type[BaseModel] | None, *failures: int, **more: Any) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if reply is None else _json_of(reply)
    described = {"200": {"description": "As it is now.", "content": content}} | _failures(*failures)
    return {"get": {"summary": summary, "responses": described} | more}


def document() -> dict[str, Any]:
    """Make the document."""
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REFERENCE)
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    secured: dict[str, Any] = {"security": [{}, {"key": []}]}
    ready = _reading("Whether an answer could be had now", schema.Health)
    ready["get"]["responses"]["503"] = {"description": "It could not.", "content": _json_of(schema.Health)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tritonstream gateway", "version": VERSION, "description": "OpenAI's API over Triton."},
        "paths": {
            "/v1/chat/completions": _asking("Answer a chat", schema.ChatRequest, schema.ChatCompletion),
            "/v1/completions": _asking("Go on with a text", schema.CompletionRequest, schema.TextCompletion),
            "/v1/models": _reading("List models and aliases", schema.ModelList, 401, 408, 500, 503, **secured),
            "/v1/models/{model}": _reading(
                "One model", schema.ModelCard, 401, 404, 408, 500, 503, parameters=[name], **secured
            ),
            "/health": _reading("Whether the gateway lives", schema.Health),
            "/health/ready": ready,
            "/metrics": _reading("Prometheus' metrics", None),
            "/version": _reading("The gateway's version", schema.Version),
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _page(found: dict[str, Any]) -> str:
    """Make a page of the document, plain HTML."""
    parts = ["<!doctype html><meta charset=utf-8><title>Tritonstream gateway</title>"]
    parts.append("<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:2px 12px 2px 0}</style>")
    parts.append("<h1>Tritonstream gateway</h1><p><a href=openapi.json>openapi.json</a></p>")
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h3><code>{method.upper()} {html.escape(path)}</code></h3><p>{operation['summary']}")
            replies = "".join(
                f"<tr><td>{s}<td>{html.escape(r['description'])}" for s, r in operation["responses"].items()
            )
            parts.append(f"<table>{replies}</table>")
    for name, model in found["components"]["schemas"].items():
        rows = (
            f"<tr><td><code>{html.escape(field)}</code><td>{html.escape(described.get('description', ''))}"
            for field, described in model.get("properties", {}).items()
        )
        parts.append(f"<h3>{name}</h3><p>{html.escape(model.get('description', ''))}<table>{''.join(rows)}</table>")
    return "\n".join(parts)


_FOUND = document()
DOCUMENT = json.encode(_FOUND)
PAGE = _page(_FOUND).encode()

"""Which conversation a request belongs to, as metadata by which a proxy sends all of its turns to the same server.

A server's prefix cache holds what it has read itself, so the second turn of a chat is cheap only where the first one
was answered. What all turns of a chat have in common is how it begins; a hash of that names it, and no one has to
remember anything. Read by exchange.py, and so by both clients and the gateway. No I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from tritonstream.request import Message, Request

HEADER = "x-tritonstream-affinity"
# Of a text that is gone on with, which grows at its end: what is shorter than this has no cache worth the way.
TEXT_CHARACTERS = 256
_DIGEST_BYTES = 8  # that two of a million conversations share a server for no reason is as good as never


def conversation(request: Request) -> str:
    """Name the conversation: the same for all its turns, and wherever the same cache could be hit.

    Of a chat it is the messages up to the user's first one, of a text its beginning; and what keeps caches apart, the
    model, the adapter and the salt.
    """
    named = [request.model, request.lora_name, request.cache_salt, _beginning(request)]
    spelled = json.dumps(named, ensure_ascii=False, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(spelled, digest_size=_DIGEST_BYTES).hexdigest()


def named(metadata: tuple[tuple[str, str], ...], request: Request) -> tuple[tuple[str, str], ...]:
    """Add the name to the metadata of a call, unless the user gave one: who knows conversations knows better."""
    if any(name == HEADER for name, _ in metadata):
        return metadata
    return (*metadata, (HEADER, conversation(request)))


def _beginning(request: Request) -> str | list[Mapping[str, object]]:
    if isinstance(request.prompt, str):
        return request.prompt[:TEXT_CHARACTERS]
    messages: list[Mapping[str, object]] = []
    for message in request.prompt:
        messages.append(message.spelled() if isinstance(message, Message) else message)
        if messages[-1]["role"] == "user":
            break
    return messages

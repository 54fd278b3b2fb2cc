"""Which model to talk to, where the user did not say."""

from __future__ import annotations

from tritonstream.errors import InvalidRequest, ServerUnavailable
from tritonstream.sync import Client


def choose_model(client: Client, wanted: str | None) -> str:
    """Return the wanted model, or else the only one that is ready.

    Raises ServerUnavailable when none is, InvalidRequest when there are several.
    """
    if wanted is not None:
        return wanted
    found = client.models()
    ready = sorted({model.name for model in found if model.ready})
    if len(ready) == 1:
        return ready[0]
    if ready:
        raise InvalidRequest(f"several models are ready ({', '.join(ready)}): choose one with --model")
    states = ", ".join(f"{model.name} is {model.state or 'not loaded'}" for model in found) or "its repository is empty"
    raise ServerUnavailable(f"no model of this server is ready: {states}")

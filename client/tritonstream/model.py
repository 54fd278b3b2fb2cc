"""A model as the server's repository index lists it."""

from __future__ import annotations

from dataclasses import dataclass

READY = "READY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One version of a model, with Triton's word for its state and, unless it is ready, the reason."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.state == READY

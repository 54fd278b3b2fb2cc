"""Text of a model on a terminal, which must not obey it."""

from __future__ import annotations

# What a terminal takes for an order: all control characters but the line feed and the tab. A model can be made to say
# them, and an escape sequence can retitle a window, rewrite what was shown, or worse.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROL[ord("\r")] = ""


def harmless(text: str) -> str:
    """Return `text` with its control characters made visible."""
    return text.translate(_CONTROL)

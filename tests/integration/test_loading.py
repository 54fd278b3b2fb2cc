"""Engine arguments that are objects, as vLLM's command line takes them, with a mistake inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import servers
from tests.support.servers import TINY
from tools.server import LaunchFailed


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"structured_outputs_config": {"backend": "none"}},
            "structured_outputs_config.backend='none': Input should be",
        ),
        ({"kv_events_config": {"publishers": 1}}, "kv_events_config.publishers=1: "),
    ],
    ids=["value", "name"],
)
def test_a_mistake_is_one_sentence(
    arguments: dict[str, Any], said: str, tiny_model: Path, tmp_path: Path, nothing_left: set[Path]
) -> None:
    """It names the argument, and what it is in."""
    engine = servers.ENGINE | {"model": str(tiny_model)} | arguments
    with pytest.raises(LaunchFailed) as caught, servers.serving(tmp_path / "repository", {TINY: engine}):
        pass
    assert f"engine_args: {said}" in str(caught.value).splitlines()[0]

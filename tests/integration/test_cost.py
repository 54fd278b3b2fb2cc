"""What streaming costs in CPU, held against a committed figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gate


@pytest.mark.timeout(600)
def test_streaming_costs_no_more_than_it_did(tmp_path: Path) -> None:
    """The CPU of stub and server for a token, over AsyncLLM's in the same run, is within a fifth of what it was."""
    most = gate.committed() * gate.TOLERANCE
    costs = []
    for attempt in range(2):  # what costs more costs more each time; what else the machine does comes and goes
        try:
            costs.append(gate.measure(tmp_path / str(attempt), print))
        except gate.TooBusy as error:
            print(error)
            continue
        if costs[-1].ratio <= most:
            return
    measured = "; ".join(cost.described() for cost in costs)
    pytest.fail(f"at most {most:.2f} is allowed, measured: {measured}")

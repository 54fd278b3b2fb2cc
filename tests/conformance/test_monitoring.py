"""What deploy/monitoring asks for is what a running server and gateway export."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support import metrics, monitoring, servers
from tests.support.metrics import Page, eventually
from tools.gateway import GatewayProcess


async def test_every_metric_and_label_that_is_asked_for_exists(
    triton: servers.Triton, front: GatewayProcess, aclient: openai.AsyncOpenAI
) -> None:
    """Every name and every label.

    A gateway's counter is there once it has counted: so one request is answered, one refused, and one left.
    """
    question: Any = [{"role": "user", "content": "What is 8 plus 5?"}]
    await aclient.chat.completions.create(model=triton.model, messages=question)
    with pytest.raises(openai.BadRequestError):
        await aclient.chat.completions.create(model=triton.model, messages=question, top_p=7)
    stream = await aclient.chat.completions.create(
        model=triton.model,
        messages=question,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    counted = ("requests_total", "rejected_total", "left_total", "tokens_total")

    def gateways() -> Page:
        return metrics.scrape(f"{front.url}/metrics", "tritonstream_gateway_")

    def all_counted() -> bool:
        names = {sample.name for sample in gateways().samples}
        return {f"tritonstream_gateway_{name}" for name in counted} <= names

    await eventually(all_counted, "the gateway has counted")
    await triton.settled()
    samples = [*triton.scrape().samples, *gateways().samples]
    for query in monitoring.queries():
        found = [sample for sample in samples if sample.name == query.metric]
        assert found, f"{query.where}: nobody exports {query.metric}"
        assert any(query.labels <= sample.labels.keys() for sample in found), (
            f"{query.where}: {query.metric} has no labels {sorted(query.labels)}, it has {sorted(found[0].labels)}"
        )

"""What deploy/kubernetes scales by is what the server says."""

from __future__ import annotations

import re

import yaml

from tests.support.kustomize import KUBERNETES
from tests.support.servers import Triton

_NAME = re.compile(r"\b(?:vllm|tritonstream|nv)[:_]\w+")


def queries() -> list[str]:
    """The queries of the autoscaler."""
    text = (KUBERNETES / "components" / "autoscaling" / "triton.yaml").read_text(encoding="utf-8")
    return [trigger["metadata"]["query"] for trigger in yaml.safe_load(text)["spec"]["triggers"]]


def test_every_metric_that_scales_is_exported(triton: Triton) -> None:
    """From the first scrape on: a query for what is not there would scale by nothing, and never say so."""
    exported = {sample.name for sample in triton.scrape().samples}
    for query in queries():
        names = _NAME.findall(query)
        assert names, query
        assert set(names) <= exported, query

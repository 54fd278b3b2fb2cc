"""One test on this process, wired to locust's events: the driver, the books, the watch, and at the end the report.

Read by users.py; importing it registers everything with locust. On a worker the books go to the master with locust's
own reports, once each, so they add up there as locust's rows do. Locust's master waits half a second for the last of
them, which is less than an answer may take: so before it stops, ours tells its workers to finish and waits until they
have.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import gevent
from gevent.pool import Group
from locust import events
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import STATE_MISSING, STATE_RUNNING, STATE_SPAWNING, MasterRunner, Runner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests.kit import charts, report, rows
from loadtests.kit.histogram import Histogram
from loadtests.kit.ledger import Ledger
from loadtests.kit.pump import Pump
from loadtests.kit.settings import Settings
from loadtests.kit.talk import Ask, Pulse, Seen
from loadtests.kit.watch import Watch

log = logging.getLogger(__name__)

BOOKS, FINISH, FINISHED = "loadtest", "loadtest_finish", "loadtest_finished"
FINISH_SECONDS = 30.0  # beyond --stop-timeout, for a worker on a busy machine to send its last report
LOOK_SECONDS = 1.0


class Session:
    """The test of one locust process."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.ledger = Ledger()
        self.steps: list[report.Held] = []
        self.settings: Settings | None = None
        self.watch: Watch | None = None
        self._pump: Pump | None = None
        self._looking: gevent.Greenlet[..., Any] | None = None
        self._users = itertools.count()
        self._finished: set[str] = set()
        self._asked = Group()
        self.ending = False

    @staticmethod
    def of(environment: Environment) -> Session:
        """The session of this environment."""
        found = getattr(environment, "tritonstream", None)
        if found is None:
            found = Session(environment)
            environment.tritonstream = found  # type: ignore[attr-defined]
        return found

    @property
    def runner(self) -> Runner:
        """Locust's runner."""
        assert self._environment.runner is not None
        return self._environment.runner

    def dice(self) -> random.Random:
        """Dice for one more user: others than any other user's of this test, the same in the next test."""
        assert self.settings is not None
        index = getattr(self.runner, "worker_index", 0)
        return random.Random(f"{self.settings.seed}/{index}/{next(self._users)}")

    def ask(self, name: str, ask: Ask) -> Seen:
        """Ask, enter what was seen into the books and into locust's rows, and return it."""
        assert self._pump is not None and self.settings is not None
        due = time.time() - (time.monotonic() - ask.due)
        self.ledger.ask(due)
        try:
            seen = self._pump.ask(ask)
        except gevent.GreenletExit:
            self.ledger.unfinished += 1
            raise
        self.ledger.note(seen, due)
        rows.note(self._environment, self.settings.target.api, name, seen)
        return seen

    def spawn(self, ask: Callable[..., Seen], *arguments: Any, **named: Any) -> None:
        """Ask on a greenlet that outlives its user: a rate that falls must not cut off what was asked before."""
        self._asked.spawn(ask, *arguments, **named)

    def drain(self) -> None:
        """Wait for what was spawned, as long as locust waits for its users; then it is unfinished."""
        try:
            self._asked.join(self._environment.stop_timeout or 0)
        finally:
            self._asked.kill()

    def start(self) -> None:
        """A test begins."""
        options = self._environment.parsed_options
        assert options is not None
        options.host = self._environment.host or options.host
        self.settings = Settings.of(options)
        self.ledger, self.steps, self._users = Ledger(), [], itertools.count()
        self._finished, self._asked, self.ending = set(), Group(), False
        if not isinstance(self.runner, MasterRunner):
            self._pump = Pump(self.settings.target, self._beat)
            self._pump.start()
        if not isinstance(self.runner, WorkerRunner):
            target = self.settings.target
            self.watch = Watch(urls=self.settings.metrics_urls, model=target.model, pid=self.settings.watch_pid)
            self._look_once()  # what was counted before is not of this test
            self._looking = gevent.spawn(self._look)

    def stop(self) -> None:
        """A test is over: its users are gone, and on a master all workers' books are in."""
        self.drain()  # a process that had no user left when the test ended has not waited yet
        if self._looking is not None:
            self._looking.kill()
            self._look_once()
            self._looking = None
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if not isinstance(self.runner, WorkerRunner) and self.settings is not None:
            memory = self.watch.memory if self.watch else []
            found = report.make(self.ledger, self.settings, self.steps, memory)
            report.tell(found)
            if self.settings.result is not None:
                report.write(found, self.settings.result)
            if self.settings.objectives:
                self._environment.process_exit_code = 0 if found["slo"]["kept"] and not self.runner.exceptions else 1

    def end(self) -> None:
        """A test begins to end, on a master with its workers."""
        self.ending = True
        self._finish_workers()

    def _finish_workers(self) -> None:
        """Let every worker finish what it has begun and send its books, before locust stops."""
        runner = self.runner
        if not isinstance(runner, MasterRunner):
            return
        wanted = {worker.id for worker in (*runner.clients.ready, *runner.clients.spawning, *runner.clients.running)}
        runner.send_message(FINISH)
        patience = time.monotonic() + (self._environment.stop_timeout or 0) + FINISH_SECONDS
        while not wanted <= self._finished and time.monotonic() < patience:
            gevent.sleep(0.05)
            gone = {
                name for name in wanted if name not in runner.clients or runner.clients[name].state == STATE_MISSING
            }
            if gone - self._finished:
                break
        if lost := wanted - self._finished:
            log.error("%d of %d workers did not finish: their last figures are missing", len(lost), len(wanted))

    def finish(self) -> None:
        """Finish what this worker has begun, and send the master all that it has not been sent."""
        runner = self.runner
        runner.stop()
        assert isinstance(runner, WorkerRunner)
        data: dict[str, Any] = {}
        self._environment.events.report_to_master.fire(client_id=runner.client_id, data=data)
        runner.send_message("stats", data)
        runner.send_message(FINISHED)

    def finished(self, worker: str) -> None:
        """A worker says that it has finished."""
        self._finished.add(worker)

    def take(self) -> dict[str, Any]:
        """The books since the last time, to be sent to the master."""
        taken: Ledger = self.ledger
        self.ledger = Ledger()
        return taken.plain()

    def judged(self) -> None:
        """At the very end: objectives of a test that never began were not kept."""
        options = self._environment.parsed_options
        if options is not None and options.slo and self._environment.process_exit_code is None:
            log.error("no test was run: nothing is known of %s", options.slo)
            self._environment.process_exit_code = 1

    def _beat(self, pulse: Pulse) -> None:
        self.ledger.generator.note(pulse)

    def _look(self) -> None:
        while True:
            gevent.sleep(LOOK_SECONDS)
            self._look_once()

    def _look_once(self) -> None:
        assert self.watch is not None and self.settings is not None
        queued: Histogram = self.watch.look()
        if queued.count:
            self.ledger.cell(int(time.time())).of("queue").merge(queued)
            scaled = rows.scaled(queued, rows.MILLI)
            rows.add(self._environment.stats, self.settings.target.api, "server: queue time ms", scaled)


@events.init.add_listener
def _init(environment: Environment, runner: Runner, web_ui: Any = None, **_: Any) -> None:
    session = Session.of(environment)
    if isinstance(runner, MasterRunner):
        runner.register_message(FINISHED, lambda environment, msg: session.finished(msg.node_id))
    elif isinstance(runner, WorkerRunner):
        runner.register_message(FINISH, lambda environment, msg: session.finish(), concurrent=True)
    if not isinstance(runner, WorkerRunner):
        options = environment.parsed_options
        assert options is not None
        try:
            if web_ui is None or options.host:  # else the web UI's form asks for it
                Settings.of(options)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
        # After everything: asked to end by a signal, locust writes its report when all its events are over.
        atexit.register(lambda: charts.append(environment, session.ledger))
    if web_ui is not None:
        charts.show(web_ui, lambda: session.ledger)

    def report_to_master(client_id: str, data: dict[str, Any]) -> None:
        data[BOOKS] = session.take()

    def worker_report(client_id: str, data: dict[str, Any]) -> None:
        if BOOKS in data:
            session.ledger.merge(Ledger.read(data[BOOKS]))

    def quitting(environment: Environment, **_: Any) -> None:
        running = runner.state in (STATE_SPAWNING, STATE_RUNNING)  # Ctrl-C or SIGTERM
        if isinstance(runner, WorkerRunner):
            if running:
                session.finish()  # the books, while there still is somebody who takes them
        else:
            if running:  # locust would stop after it has chosen its exit code
                if isinstance(runner, MasterRunner):
                    # They have finished, and quit when locust tells them; told to stop, they would stay on for minutes.
                    runner.stop(send_stop_to_client=False)
                else:
                    runner.stop()
            session.judged()
            if environment.parsed_options is not None and environment.parsed_options.csv_prefix:
                gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.1)  # locust writes its CSV once a second, but not at the end

    environment.events.report_to_master.add_listener(report_to_master)
    environment.events.worker_report.add_listener(worker_report)
    environment.events.quitting.add_listener(quitting)


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    try:
        Session.of(environment).start()
    except ValueError as error:
        log.error("%s", error)
        raise StopTest(str(error)) from error


@events.test_stopping.add_listener
def _stopping(environment: Environment, **_: Any) -> None:
    Session.of(environment).end()


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    Session.of(environment).stop()

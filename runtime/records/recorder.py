"""Keeps the service's records: listens to its calls and decisions, hands facts to the writers, and counts for Prometheus."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from envs.domain.requests import SERVICE_CLASSES
from envs.scenario.scenario_error import ScenarioError
from envs.traces.formats.ballast import head_line as trace_head
from runtime.calls import PRESSURE
from runtime.records import decision_records, request_records
from runtime.records.line_writer import LineWriter, started_stamp
from runtime.records.settings import RecordEntry
from runtime.scheduling.call_ledger import CallAccount
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.online_scheduler import Made

MIB = 1 << 20


class Recorder(Collector):
    """Request and decision records of one run, from `start` to `close`."""

    def __init__(self, dispatcher: Dispatcher, settings: RecordEntry, service_name: str) -> None:
        """Raises: ScenarioError when the folder cannot be made."""
        assert settings.dir is not None
        folder = Path(settings.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScenarioError(f"records.dir: {folder}: {error.strerror}; give a folder that can be made") from error
        self._dispatcher, self._settings = dispatcher, settings
        self._groups = [backend.name for backend in dispatcher.backends]
        self._started_s, unix_s, stamp = time.monotonic(), time.time(), started_stamp()
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
        heads = {
            "requests": trace_head(f"{service_name}, served since {since}", SERVICE_CLASSES[0].name, False),
            "decisions": decision_records.head_line(self._groups, unix_s),
        }
        lines = request_records.RequestLines(secrets.token_bytes(32))
        self._requests, self._decisions = (
            LineWriter(folder, kind, stamp, heads[kind], encode, int(settings.file_mib * MIB), settings.files_max, settings.queue_max)
            for kind, encode in (("requests", lines.line), ("decisions", decision_records.line_of))
        )

    def start(self) -> None:
        for writer in (self._requests, self._decisions):
            writer.start()
        self._dispatcher.ledger.listeners.append(self._call_ended)
        self._dispatcher.scheduler.listeners.append(self._decided)

    def close(self) -> None:
        """Writes what waits; takes a few seconds at most."""
        self._dispatcher.ledger.listeners.remove(self._call_ended)
        self._dispatcher.scheduler.listeners.remove(self._decided)
        for writer in (self._requests, self._decisions):
            writer.close()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("ballast_records", "Records by kind, written or dropped.", labels=("kind", "outcome"))
        for writer in (self._requests, self._decisions):
            family.add_metric((writer.kind, "written"), float(writer.written))
            family.add_metric((writer.kind, "dropped"), float(writer.dropped))
        yield family

    def _call_ended(self, account: CallAccount) -> None:
        """Where a refusal need not be the end of it, what comes after belongs in its record."""
        if account.call.notes.has_smaller and account.end in PRESSURE:
            account.call.notes.when_over = partial(self._record, account)
        else:
            self._record(account)

    def _record(self, account: CallAccount) -> None:
        self._requests.put(request_records.facts_of(account, self._started_s, self._settings.prompt_ids))

    def _decided(self, made: Made) -> None:
        arm = self._dispatcher.ledger.arm(made.question.request.request_id)
        at_s = time.monotonic() - self._started_s
        self._decisions.put(decision_records.facts_of(made, at_s, arm, self._settings.observations))

"""The reports of a reader to the home that holds its lease."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry._control.batches import read_done
from kvferry._control.connection import Control, checked_results
from kvferry._control.reader_lease import ReaderLease
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT = 1.0
"""Seconds for the home's verdict; without one the reader's own deadline decides (PROTOCOL, Endings)."""


class Reporter:
    """Speaks for one engine. Thread-safe; its calls block."""

    def __init__(self, reader: pb.EngineRef) -> None:
        self._reader = reader

    def report(
        self, home: Control, lease: ReaderLease, reports: Sequence[pb.RankReport]
    ) -> pb.Verdict.ValueType | None:
        """Tell how shares ended; the home's verdict, or None if it did not answer in time."""
        try:
            return self._tell(home, lease, reports, VERDICT_TIMEOUT)
        except KvferryError as error:
            logger.info("report to %s not answered: %s", home.address, error)
            return None

    def _tell(
        self, home: Control, lease: ReaderLease, reports: Sequence[pb.RankReport], timeout: float
    ) -> pb.Verdict.ValueType:
        request = pb.NotifyRequest(sender=self._reader, notifications=read_done(lease.lease_id, reports))
        results = checked_results(request, home.notify(request, timeout), home.address)
        verdicts = [result.read_ended.verdict for result in results]
        # Those of one lease at one moment; if it ended in between, that is what counts.
        return next((verdict for verdict in verdicts if verdict != pb.VERDICT_VALID), verdicts[-1])

"""What vLLM's log says of a failed read."""

from __future__ import annotations

import logging

from kvferry import parse_reference
from kvferry.engine import ReadEnd
from kvferry.errors import KvferryError

logger = logging.getLogger(__name__)


def log_failure(end: ReadEnd, reference: str, engine_id: str, *, aborted: bool) -> None:
    """Log a failed read in one line, with the names by which the source's log calls it and no secret.

    Args:
        end: how it ended.
        reference: the reference of its publication.
        engine_id: the engine that reads.
        aborted: vLLM has aborted the request.
    """
    mine = _shown(end.request_id)
    read = f"read {end.read_id} of request {mine}" if end.read_id else f"request {mine}"
    try:
        parsed = parse_reference(reference)
    except KvferryError:
        source = "a source that its reference does not name"
    else:
        known = parsed if end.source is None else end.source
        named = f"publication {known.publication} of request {known.request_id!r}"
        if not known.publication:
            # A router made the reference, and no publication has come.
            named = "a publication that has not come"
        source = f"{named}, engine {_shown(known.engine_id)} at {_shown(known.home)}"
    how = "was cancelled" if aborted else "failed" if end.read_id else "will not be read"
    log = logger.info if aborted else logger.warning
    log("%s, engine %s, %s: %s: %s; source: %s", read, engine_id, how, type(end.error).__name__, end.error, source)


def _shown(name: str) -> str:
    """Return a name that any client may have made, of a reference or of its request, so that it stays within its line
    of the log."""
    return name if name.isprintable() else repr(name)

"""A publication of which its home hears when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvferry._control.publication_sender import Sent
from kvferry._control.publications import Publication
from kvferry._control.publish import Publish
from kvferry._session import EngineSession, home_session_of


def offered(session: EngineSession, given: Publish) -> tuple[Publication, Callable[[], None]]:
    """Publish; returns the publication, and a function that sends it to its home and waits for the answer."""
    home, held = home_session_of(session), list[tuple[Any, ...]]()
    put = home._sender.put
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(home._sender, "put", lambda *message: held.append(message))
        publication = home.publish_later(given)
    ((_, step, until, _),) = held

    def send() -> None:
        sent: Future[Sent] = Future()
        with home.lock:
            put(publication, step, until, sent)
        assert sent.result(30).error is None

    return publication, send

"""A publication of which its home hears when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry._control.publications import Publication
from kvferry._control.publish import Publish
from kvferry._session import EngineSession, home_session_of


def offered(session: EngineSession, given: Publish) -> tuple[Publication, Callable[[], None]]:
    """Publish; returns the publication, and a function that sends it to its home and waits for the answer."""
    home, held = home_session_of(session), list[tuple[Any, ...]]()
    put = home._sender.put
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(home._sender, "put", lambda *message, **_: held.append(message))
        patched.setattr(home._sender, "wait", lambda *_: None)
        publication = home.publish(given)
    ((_, step),) = held

    def send() -> None:
        with home.lock:
            message = put(publication, step, awaited=True)
        home._sender.wait(message, 30.0)

    return publication, send

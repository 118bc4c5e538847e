"""The Watch of a rank in a process that does not have the engine's session, which has a Watch of its own."""

from __future__ import annotations

from collections.abc import Callable

from kvferry._control.connection import Control
from kvferry._control.watcher import Watcher
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.v1 import kv_transfer_pb2 as pb


def rank_watcher(control: Control, token: EngineToken, rank: int, need_resync: Callable[[], None]) -> Watcher:
    """Return a Watch, still to be opened, by which the node server knows that a rank's process is alive.

    Args:
        control: connection to the node server.
        token: of the engine.
        rank: index of the rank.
        need_resync: called on the watcher's thread when the node server has lost its record of the rank.
    """
    request = pb.WatchRequest(
        engine=engine_ref(token),
        session_secret=token.session_secret,
        role=pb.WATCH_ROLE_RANK,
        rank=rank,
        home=token.home,
    )

    def on_event(message: pb.WatchResponse) -> None:
        if message.WhichOneof("event") == "synced" and message.synced.need_resync:
            need_resync()

    return Watcher(control, request, on_event, f"{token.engine_id}-{rank}")

"""The guard around every handler of a node server.

- Errors leave a server only through the guard: typed errors as their status; any other exception as INTERNAL, without
  its text, but with an id that is also in the log.
- Before it reads the request, it checks that the call has a deadline, and whether the caller may call the method at
  all; before a handler sees the request, whether the caller may do what the request asks for.
- It limits how many calls run at once, in all and for each host.
- It ends open streams before the server stops: gRPC would wait for a single open stream for the whole grace.
- It reads and decodes requests itself (`kvferry_server.node.requests`). So calls can be refused before their requests
  are read, bytes that do not decode end in a typed error, and few requests of one host are in memory at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from kvferry._wire.status import to_status
from kvferry.errors import DeadlineRequired, InternalError, KvferryError, NotImplementedHere, ServerDraining
from kvferry.stats import Distribution
from kvferry_server.admin.node_state import ABORTED, BOUNDS, INTERNAL, LEFT, OK, CallCounts
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.node.connections import Endings
from kvferry_server.node.limits import ANSWER_TIMEOUT, LARGE_MESSAGE, MAX_PENDING_ANSWERS, RETRY_AFTER
from kvferry_server.node.requests import KV_TRANSFER, HeldRequest, Requests
from kvferry_server.node.tracing import Behaviour, Traced, untraced
from kvferry_server.servicers.access import Access
from kvferry_server.servicers.callers import Context, host_of, on_end

logger = logging.getLogger(__name__)

WITHOUT_DEADLINE = frozenset({KV_TRANSFER + "Watch"})
"""Calls of KVTransfer that last as long as a process does; all others of KVTransfer need a deadline. Introspection
never waits, and operators' tools (`buf curl`, `grpcurl`) send no deadline."""

UNKNOWN_METHOD = "the called method"  # Stands for the path of a call to an unknown method, which is never decoded
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Work: TypeAlias = Callable[[Context, str], Awaitable[Any]]  # What a call does, given its context and the caller's host

PAGED_ANSWERS = frozenset({KV_TRANSFER + "Handshake"})
"""Streams that carry one answer in several messages. Their requests may be as large as those of unary calls."""

WAITING = frozenset({KV_TRANSFER + "ReadBlocks"})
"""Unary calls that wait for news. They count as streams, so that they keep no other calls out. The drain of the home
ends their waits."""


class Guard:
    """Wraps every handler of one gRPC server; see the module. Belongs to one event loop.

    Attributes:
        calls, streams: the budgets of running calls, by host. Streams, and calls that wait, are counted apart, so that
            they do not keep renewals and reports out. A host may start a call as long as it then has at most as many
            calls as are free: a single host gets half, each of two a third, and one call is always free for a host
            that has none. Callers on the UNIX socket cannot be told apart and may have all.
        answers: the budget of large answers that clients have not taken yet.
    """

    def __init__(
        self,
        calls: int,
        streams: int,
        access: Access,
        requests: Requests,
        counts: CallCounts | None = None,
        traced: Traced = untraced,
    ) -> None:
        self.calls = Budget(calls, 1)
        self.streams = Budget(streams, 1)
        self.answers = Budget(MAX_PENDING_ANSWERS, 0)
        self.requests = requests
        self.budgets = {"calls": self.calls, "streams": self.streams, "answers": self.answers}
        self.budgets["requests"] = requests.memory
        self._access = access
        self._counts = counts or CallCounts()
        self._traced = traced
        self._open: set[asyncio.Task[Any]] = set()
        self._ending = False
        self._endings = Endings()

    def guarded(self, method: str, handler: Handler | None) -> Handler:
        """Wrap the handler of a method; without a handler, make one that refuses calls. The requests of the guarded
        handler are a stream, whatever the method has: otherwise gRPC reads the request before it calls the handler. A
        single answer stays single: gRPC sends it in one piece with the status."""
        if handler is None:

            async def refuse(context: Context, host: str) -> None:
                await self.requests.raw(context, host)
                raise _not_offered(method)

            # The names of unknown methods come from strangers, so they do not become labels of metrics.
            refusing = self._limited(method, "unknown", self.calls, refuse, timed=True)
            return grpc.stream_unary_rpc_method_handler(refusing)
        work, waits = self._work(method, handler), method in WAITING
        if handler.unary_unary is not None:
            call = self._limited(method, method[1:], self.streams if waits else self.calls, work, timed=not waits)
            return grpc.stream_unary_rpc_method_handler(self._traced(method, call))
        stream = self._ended_by_stop(work)
        call = self._limited(method, method[1:], self.streams, stream, timed=method in PAGED_ANSWERS)
        encode = _encoder(handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(self._traced(method, call), None, encode)

    def end_streams(self) -> None:
        """End all open and later streams with DRAINING."""
        self._ending = True
        for task in tuple(self._open):
            task.cancel()

    async def streams_ended(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until no stream is open. Returns whether none is."""
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=timeout)
        return not self._open

    def _work(self, method: str, handler: Handler) -> Work:
        """Read, check and answer a call. Returns the encoded answer of a unary call."""
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream
        decode, encode = handler.request_deserializer, _encoder(handler.response_serializer)
        needs_deadline = method.startswith(KV_TRANSFER) and method not in WITHOUT_DEADLINE

        async def work(context: Context, host: str) -> bytes | None:
            held: HeldRequest | None = None
            answer, write = None, context.write
            try:
                if needs_deadline and context.time_remaining() is None:
                    raise DeadlineRequired(f"{method} needs a deadline: set a timeout for the call")
                check = self._access.admit(method, context)
                request: Any = self.requests.each(decode, context, host)
                if not handler.request_streaming:
                    request, held = await self.requests.read(method, decode, context, host)
                    if method in PAGED_ANSWERS:
                        write = partial(self._write_page, context, held)
                check(request)
                if handler.response_streaming:
                    await _drive(behaviour(request, context), write)
                else:
                    answer = encode(await behaviour(request, context))
            finally:
                # An error that leaves this frame keeps the frame for a while, but must not keep the request.
                request = None
                if held is not None:
                    held.free()
            if answer is not None:
                self._send(context, host, len(answer))
            return answer

        return work

    def _ended_by_stop(self, work: Work) -> Work:
        """Let `end_streams` end a stream."""

        async def stream(context: Context, host: str) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._open.add(task)
            try:
                if self._ending:
                    raise asyncio.CancelledError
                await work(context, host)
            except asyncio.CancelledError:
                # Either the client has left, or the server ends its streams.
                if not self._ending:
                    raise
                message = "this node server is draining: it serves again when kvferryd has been restarted"
                raise ServerDraining(message) from None
            finally:
                self._open.discard(task)

        return stream

    def _limited(self, method: str, name: str, budget: Budget, work: Work, *, timed: bool) -> Behaviour:
        """Return a handler that counts calls of `work` against a budget and, by `name`, in metrics, and ends those that
        fail with a status. `timed`: the calls do not wait for news, so that their duration says something."""
        results = self._counts.results
        # Both from the start, because a rate needs a first value.
        results[name, OK] += 0
        results[name, INTERNAL] += 0
        taken = self._counts.taken.setdefault(name, Distribution(BOUNDS)) if timed else None

        async def call(_: object, context: Context) -> Any:
            began, result = perf_counter(), LEFT
            try:
                host = host_of(context.peer())
                if host or budget.used >= budget.capacity:
                    check_budget("max_calls" if budget is self.calls else "max_streams", budget, host, RETRY_AFTER)
                budget.take(host)
                try:
                    answer = await work(context, host)
                finally:
                    budget.give(host)
                result = OK
                return answer
            except Exception as error:
                if is_gone(error):
                    # For any other error gRPC would log each call whose client has left.
                    raise asyncio.CancelledError("the call has ended") from None
                # The handler may have aborted the call itself, as the health servicer does.
                if isinstance(error, grpc.aio.AbortError):
                    result = ABORTED
                    raise
                result = (error.reason if isinstance(error, KvferryError) else "") or INTERNAL
                await self._abort(context, method, result, error)
            finally:
                results[name, result] += 1
                if taken is not None:
                    taken.add(perf_counter() - began)

        return call

    def _send(self, context: Context, host: str, size: int) -> None:
        """Count a large answer, which gRPC sends next, until the client has taken it. A client that takes nothing for
        `ANSWER_TIMEOUT` loses its connection. Raises `LimitReached` if too many bytes wait already."""
        size = size if size >= LARGE_MESSAGE else 0
        if size:
            check_budget("answers", self.answers, host, RETRY_AFTER, size)
            self.answers.take(host, size)
        timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT, lambda: self._endings.end(context.peer()))

        def sent() -> None:
            timer.cancel()
            if size:
                self.answers.give(host, size)

        on_end(context, sent)

    async def _abort(self, context: Context, method: str, reason: str, error: Exception) -> NoReturn:
        if self._counts.events is not None:
            values = error.values if isinstance(error, KvferryError) else {}
            peer = context.peer().rstrip(":")
            self._counts.events.refusal(method.rpartition("/")[2], reason, values, {"peer": peer})
        status = to_status(_told(error, method))
        # The frames of the handler hold the request, and the error and its frames form a cycle, which would last until
        # the next garbage collection. When that comes depends on the number of objects, not on their size.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            # The status is sent after all earlier messages.
            await self._taken(context, context.abort(*status))
        except grpc.aio.BaseError as failed:
            # AbortError is the normal case.
            if is_gone(failed):
                raise asyncio.CancelledError("the call has ended") from None
            raise
        raise InternalError(f"{method} goes on after it was aborted")

    async def _write_page(self, context: Context, held: HeldRequest, page: Any) -> None:
        # All pages are there before the first is written.
        held.end_turn()
        await self._taken(context, context.write(page))

    async def _taken(self, context: Context, sending: Awaitable[None]) -> None:
        """Wait until gRPC has sent something. A client that takes nothing for `ANSWER_TIMEOUT` loses its connection:
        gRPC has no other way to drop the data that it keeps for the client."""
        timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT, self._endings.end, context.peer())
        try:
            await sending
        finally:
            timer.cancel()


def _told(error: Exception, method: str) -> KvferryError:
    """Return the error for the caller. The text of an untyped error goes to the log only."""
    if isinstance(error, NotImplementedError):
        # Raised by a servicer's generated base class for a method that is not implemented.
        return _not_offered(method)
    if isinstance(error, KvferryError) and error.reason:
        return error
    error_id = secrets.token_hex(8)
    logger.error("%s failed, error_id %s", method, error_id, exc_info=error)
    return InternalError(f"internal error; the node server's log has details under {error_id}", error_id=error_id)


def _not_offered(method: str) -> NotImplementedHere:
    message = f"this node server does not offer {method}: is it another version than the caller?"
    return NotImplementedHere(message, what=method)


async def _drive(answer: AsyncGenerator[Any, None] | Awaitable[None], write: Callable[[Any], Awaitable[None]]) -> None:
    """Run a streaming handler: an async generator, or a coroutine that writes the messages itself."""
    if isinstance(answer, Awaitable):
        await answer
        return
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            await write(message)


def _encoder(encode: Any) -> Callable[[Any], bytes]:
    """Let bytes through an encoder: messages that many clients get are encoded only once."""
    return lambda message: message if isinstance(message, bytes) else encode(message)


def is_gone(error: Exception) -> bool:
    """Whether the client has left, or gRPC's server has stopped."""
    wrong_use = grpc.aio.AbortError | grpc.aio.UsageError
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, wrong_use)

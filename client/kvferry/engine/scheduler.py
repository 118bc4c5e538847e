"""The port of an engine's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry import _arguments as arguments
from kvferry._cache import OPEN_TIMEOUT, READ_TIMEOUT
from kvferry._client import Client, client_runtime_of
from kvferry._control.acquire_request import ReadTerms
from kvferry._control.home_session import HomeSession
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.publications import Publication, Release
from kvferry._control.publish import Publish, PublishMore
from kvferry._control.questions import ANSWER_WAIT, AskedPrefix, Question
from kvferry._directory.directory import Listing
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing
from kvferry._prompt import Prompt
from kvferry._reads.leased_read import ReadStage
from kvferry._session import EngineCalls, home_session_of
from kvferry.engine.scheduler_reads import Reads
from kvferry.engine.values import Finished, Grant, GrantStep, Offer, SchedulerStats, WorkerOutput
from kvferry.geometry.blocks import Blocks, blocks_by_group

MAX_WAITING = 4096
"""Default of `SchedulerPort`'s `max_waiting`."""


class SchedulerCalls(EngineCalls):
    """The calls of `SchedulerPort` that return at once. `kvferry.aio.AsyncSchedulerPort` has the same.

    Attributes:
        spec: the engine.
    """

    def __init__(self, session: HomeSession, holder: LeaseHolder, reads: Reads) -> None:
        super().__init__(session)
        self._holder = holder
        self._reads = reads

    # As a source.

    @arguments.takes(Publish)
    def publish(self, given: Publish) -> Publication:
        """Publish a request's blocks, as `EngineSession.publish` does, without a wait. The blocks contain their bytes
        already: on a GPU, every rank's device has completed the kernels that write them. The engine must not change or
        free the blocks until `released` returns the publication (R2), with the outcome ABORTED if the home refuses it.

        Args:
            given: each field of `Publish` is an argument of its own: ``publish("r7", {"full": Blocks([3, 4])},
                last=False)``.

        Returns:
            The publication. A reader may use its reference at once: if the home does not know the publication yet, the
            read waits.

        Raises:
            BadReference, RouterKeyUsed, BadBlock, InvalidField: see `EngineSession.publish`. After these and the next
                error nothing is published, and `released` returns nothing.
            Closed: the engine's session has ended.
        """
        return self._session.publish(given)

    @arguments.takes(PublishMore)
    def publish_more(self, given: PublishMore) -> None:
        """Publish the next blocks of a publication that is not complete yet, as `EngineSession.publish_more` does, but
        without a `timeout` and a wait.

        Raises:
            WrongState: the publication is complete, or was released.
            BadBlock, InvalidField, Closed: see `publish`.
        """
        self._session.publish_more(given)

    def abort(self, publication: Publication) -> None:
        """Withdraw a publication: the home refuses new reads, and `released` returns it when its reads have ended."""
        self._session.abort(
            arguments.instance("publication", publication, Publication, "the Publication that publish returned")
        )

    def released(self) -> list[Release]:
        """Return the publications released since the last call, each exactly once (R3): their blocks may be changed and
        freed. Call this in every step."""
        return self._session.released()

    def questions(self) -> list[Question]:
        """Return the questions of other engines since the last call, each exactly once: what does this engine have
        cached of a prompt? Call this in each step; nearly free if there are none.

        Answer each in the same step, if possible: with ``publish(request_id, blocks, reference=question.reference,
        prompt=question.prompt)``, where the blocks hold the longest prefix that the engine has, from a block at or
        before `Question.first_token` on, or with `miss`. The blocks are pinned until `released`, which comes within
        seconds if nobody reads. An engine that answers nothing makes each asker wait for its whole time.
        """
        return self._session.questions()

    def on_question(self, heard: Callable[[], object]) -> None:
        """Call `heard` for each new question, on the client's event loop, which must not wait: a waiting call of
        kvferry there raises `WrongState`. What `heard` raises is logged. For engines that run no steps while they have
        nothing to do."""
        self._session.on_question(heard)

    # As a destination.

    def acquire(
        self,
        request_id: str,
        reference: str,
        *,
        expected_reads: int = 0,
        progressive: bool = False,
        timeout: float = READ_TIMEOUT,
        traceparent: str = "",
        prompt: Prompt = Prompt.unknown,
    ) -> None:
        """Start to acquire a publication: wait for it, and pin its blocks with a lease. If they are in the reference,
        `granted` returns them at once, and a lease follows only if the read takes longer than a moment.

        Call this when the request arrives, before it has blocks of its own.

        Args:
            request_id: this engine's name for the request; a request has one read at a time.
            reference, expected_reads, traceparent: see `Cache.read`.
            progressive: grant the read with the first blocks that the source publishes, and move each further step
                while the source still computes. The engine then passes on the steps that `grant_steps` returns. If
                False, the read is granted when the publication is complete.
            timeout: seconds until the read fails, the wait for the publication included (R5). Workers have 10 s more to
                report the ends of their shares; the error names the ranks that did not.
            prompt: the prompt of this request. A publication of another prompt is refused (`PromptMismatch`) as soon as
                a mark of its source shows this: before bytes move.

        Raises:
            BadReference, HomeNotAllowed, InvalidField: see `Cache.read`.
            WrongState: the request is being read already.
            LimitReached: `max_waiting` reads are waiting for their publications.
        """
        self._acquire(request_id, reference, ReadTerms(timeout, traceparent, prompt, progressive, expected_reads))

    def ask(
        self,
        request_id: str,
        engine: str | Listing,
        prompt: Prompt,
        *,
        first_token: int = 0,
        wait: float = ANSWER_WAIT,
        timeout: float = READ_TIMEOUT,
        traceparent: str = "",
        progressive: bool = False,
    ) -> None:
        """Ask an engine for what it has cached of a prompt's beginning, and acquire it. Goes on like `acquire`:
        `granted` returns an `Offer`, whose blocks begin at or before `first_token`, and end where the engine's own
        prefix ends (`Offer.blocks`). Compute the rest.

        `granted` raises `PrefixMiss`, at the latest a second after `wait`, if there is nothing to read, the engine
        does not answer, or its home is away: compute the prompt. Answers that come later are given back. It raises
        `NotAllowed` or `EngineUnknown` if this caller may not ask the engine, or the home has none of this name.

        The prompt is copied to that engine on other threads, however long it is. Of a prompt of more than 235,000
        tokens, the first 235,000 are asked for.

        Args:
            engine: the other engine's `SchedulerPort.engine_reference` or `Cache.engine_reference`; or its `Listing`,
                as ``Listing(engine_id, home)`` or from a directory: whichever engine has this name at this home now.
                By its name alone a home lets only the holder of a certificate ask that has the role of its reader.
            prompt: the prompt of this request. Without a mark of it, no answer is accepted, also under the
                ``prompt_check="compare"`` of the client.
            first_token: the first token wanted; what lies before it, this engine has itself.
            wait: seconds to wait for the answer, at most 2.
            request_id, timeout, traceparent, progressive: see `acquire`.

        Raises:
            BadReference, HomeNotAllowed, WrongState, LimitReached: see `acquire`.
            InvalidField: the prompt is unknown, or not known up to `first_token`; or another argument is wrong.
        """
        asked = AskedPrefix(engine, prompt, first_token, wait, self.spec.groups)
        self._acquire(request_id, asked, ReadTerms(timeout, traceparent, prompt, progressive))

    def _acquire(self, request_id: str, source: str | AskedPrefix, terms: ReadTerms) -> None:
        request_id = arguments.text("request_id", request_id)
        request = self._holder.request(source, terms, request_id=request_id, parties=self.spec.num_ranks)
        self._reads.acquire(request_id, request)

    def news(self) -> list[str]:
        """Return the requests for which `granted` has a new result: they were granted or refused since the last call,
        or their offers have grown. For engines with many waiting requests: nearly free if there are none."""
        return self._reads.take_changed()

    def granted(self, request_id: str) -> Offer | None:
        """Return the source's blocks for a request once its lease is granted; None while the request waits. `attach`
        makes the `Grant` that workers start. The offer of a ``progressive=True`` request may come with the first
        blocks, and is then not `complete`.

        Raises:
            WrongState: the request was not acquired, or its read has ended.
            PrefixMiss: the engine that was asked has nothing to read. After this and the next error, the port forgets
                the request.
            KvferryError: the home will not grant the request, for example `PublicationTimeout`, `PublicationAborted` or
                `PeerRestarted`.
        """
        return self._reads.granted(arguments.text("request_id", request_id))

    def attach(
        self,
        request_id: str,
        local_blocks: Mapping[str, Blocks],
        tokens: tuple[int, int] | None = None,
        *,
        allow_overlap: bool = False,
        prompt: Prompt = Prompt.unknown,
    ) -> Grant:
        """Give a granted request the blocks to read into. They belong to the read until `finished` returns it.

        Args:
            request_id: a request for which `granted` has returned an `Offer`.
            local_blocks: all blocks to read into, by group, also if the offer is not complete; `Blocks.first_token` is
                the first token wanted.
            tokens: the tokens wanted, ``[a, b)``; None: all published tokens, of an offer that is complete.
            allow_overlap: accept blocks that another read of the engine writes to, or that the engine has published.
                For engines that know that the bytes do not overlap.
            prompt: the prompt of this request, for engines that did not have it when they called `acquire`. Until then
                no prompt is compared: such engines do not use the offer's payload before this call has returned.

        Returns:
            The grant: the offer with these blocks, for `WorkerPort.start` on every rank. If it is not `complete`,
            `grant_steps` returns the rest.

        Raises:
            BadBlock: a block does not belong to this engine, is given twice, is published, or may still be written to
                by another read. After this and the next two errors, the request stays granted.
            BlocksShort: there are too few blocks for the tokens, or too few tokens were published.
            InvalidField: an argument has the wrong type, a group has no blocks, or `tokens` is missing although the
                offer is not complete.
            WrongState: the request is not granted yet, has its blocks already, or was not acquired.
            PromptMismatch, PromptUnmarked: the publication is of another prompt, or no mark shows that it is of this
                one. After this and the next error, the port forgets the request.
            KvferryError: the lease has ended in the meantime, for this reason.
        """
        return self._reads.attach(
            arguments.text("request_id", request_id),
            blocks_by_group("local_blocks", local_blocks),
            arguments.token_range(tokens),
            allow_overlap=arguments.flag("allow_overlap", allow_overlap),
            prompt=arguments.instance("prompt", prompt, Prompt, "a Prompt"),
        )

    def grant_steps(self) -> list[GrantStep]:
        """Return the blocks that sources have published for attached reads since their grants and since the last call:
        at most one step per read and call, which may stand for several publishes.

        Pass each to `WorkerPort.add_step` on every worker. Call this in every step of an engine that acquires with
        ``progressive=True``; a read whose steps do not reach its workers fails at its timeout.
        """
        return self._reads.grant_steps()

    def decline(self, reference: str, *, prompt: Prompt = Prompt.unknown) -> None:
        """Tell the source's home that this engine will not read a publication, after a full prefix hit or a rejected
        request: see `Client.decline`. The port forgets reads of the publication to which no blocks were attached. A
        publication of another `prompt` is not declined: its own reader may still come.

        Raises:
            PromptMismatch: according to its reference or to a read, the publication is of another prompt.
            BadReference, HomeNotAllowed: see `acquire`.
            Closed: the port is closed.
        """
        self._reads.decline(reference, arguments.instance("prompt", prompt, Prompt, "a Prompt"))

    def cancel(self, request_id: str) -> bool:
        """Cancel the read of a request; returns whether there was one. If blocks are attached, `finished` returns the
        read's end; if not, the port forgets the read."""
        return self._reads.cancel(arguments.text("request_id", request_id))

    def collect(self, output: WorkerOutput) -> None:
        """Take the report of a worker. Idempotent. Raises `InvalidField` if the engine has no such rank."""
        self._reads.collect(arguments.instance("output", output, WorkerOutput, "a WorkerOutput, as a worker gave it"))

    def cancels(self) -> list[str]:
        """Return the read_ids to pass to `WorkerPort.cancel` on every worker. Call this in every step.

        Each is returned once, but that of a read which has ended and is not quiet again every 10 s: a rank may never
        have received its grant, or its report was lost, and its answer to the cancel makes the blocks quiet.
        """
        return self._reads.cancels()

    def finished(self) -> Finished:
        """Return the reads that have ended on all ranks, each exactly once, and those that became quiet later. Call
        this in every step."""
        return self._reads.finished()

    async def until_news(self, timeout: float) -> bool:
        """Wait like `wait_news`, in asyncio, on any event loop."""
        return await self._reads.news.arrive(arguments.seconds("timeout", timeout, zero=True))

    def stats(self) -> SchedulerStats:
        """Return the counts of this engine's publications and reads that are under way."""
        stages = self._reads.stages()
        return SchedulerStats(
            pinned=self._session.pinned(),
            waiting=stages[ReadStage.WAITING],
            granted=stages[ReadStage.GRANTED],
            reading=stages[ReadStage.READING],
            judging=stages[ReadStage.JUDGING],
            uncertain=stages[ReadStage.ENDED],
        )


class SchedulerPort(SchedulerCalls, Closing):
    """The port of an engine's scheduler: publishes the engine's blocks, and holds the leases of its ranks' reads.

    An engine has one such port, which opens the engine's session and decides whether the bytes of each read count
    (PROTOCOL, Leases 4). The engine passes the reports of its workers to the port: `WorkerPort.finished` → `collect`.

    Threading: every method may be called from any thread. All but the constructor, `wait_news` and `close` return at
    once; RPCs and NIXL run on other threads (R11).

    Args:
        client: the client of this process. The port does not close it.
        spec: the engine.
        hold_until_quiet: `finished` withholds a failed read until no write to its blocks is possible any more. For
            engines that cannot set blocks aside.
        max_waiting: most reads that wait for their publication at once; `acquire` refuses more.
        timeout: seconds to wait until the session is open.

    Raises:
        KvferryError: see `Client.open_engine`.
    """

    def __init__(
        self,
        client: Client,
        spec: EngineSpec,
        *,
        hold_until_quiet: bool = False,
        max_waiting: int = MAX_WAITING,
        timeout: float = OPEN_TIMEOUT,
    ) -> None:
        max_waiting = arguments.integer("max_waiting", max_waiting, 1)
        arguments.flag("hold_until_quiet", hold_until_quiet)
        session = home_session_of(client.open_engine(spec, timeout=timeout))
        runtime = client_runtime_of(client)
        holder = runtime.lease_holder(session.token)
        reads = Reads(
            runtime.loop,
            spec,
            holder,
            session.block_use.writes(),
            max_waiting,
            hold_until_quiet=hold_until_quiet,
            meter=runtime.reads,
        )
        super().__init__(session, holder, reads)
        session.on_question(reads.news.tell)

    def wait_news(self, timeout: float) -> bool:
        """Wait, at most `timeout` seconds, until `granted`, `grant_steps`, `finished` or `questions` has news; returns
        whether there may be news.

        For engines that would otherwise run empty steps: such a loop takes the processor, and Python's lock, from the
        threads that the reads wait for.
        """
        return self._reads.news.wait(arguments.seconds("timeout", timeout, zero=True))

    def close(self, timeout: float = 5.0) -> None:
        """Send the pending messages to the homes, for at most `timeout` seconds for publications and for reads each,
        and end the session and its incarnation, see `EngineSession.close`. Idempotent."""
        timeout = arguments.seconds("timeout", timeout, zero=True)
        self._reads.close(timeout)
        self._session.close(timeout)

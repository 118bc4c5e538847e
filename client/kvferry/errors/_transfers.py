"""Errors of moving bytes: reads that failed, and NIXL."""

from __future__ import annotations

from kvferry.errors._base import KvferryError


class TransferError(KvferryError):
    """A read failed; what its destination blocks hold is not valid.

    Next step: compute the request, and reuse the destination blocks only when `quiet` is True.

    Attributes:
        quiet: whether nothing can write to the destination blocks any more (R4). While it is False they must not be
            reused; `Read.wait_quiet` waits until it is True. In the process that ran the transfer it becomes True by
            itself; in a copy that was pickled or sent it does not change. In an error that was rebuilt from a message
            without it, it is False.
    """

    def __init__(self, message: str, *, quiet: bool = True, **values: object) -> None:
        super().__init__(message)
        self.values = {key: str(value) for key, value in values.items()}
        self.quiet = quiet

    def _set_attributes(self) -> None:
        # An error is no proof that writing stopped (R4).
        self.quiet = False


class TransferFailed(TransferError):
    """A rank's share of a read failed: the transfer from a source rank, or something at the reader."""

    reason = "TRANSFER_FAILED"
    code = "ABORTED"


class TransferExpired(TransferError):
    """The lease ended before the read; its bytes do not count (R1).

    Next step: compute the request. If it comes again, look for a reader that stands still for longer than
    kvferryd's `--ttl`, or a home that it cannot reach.
    """


class TransferCancelled(TransferError):
    """The read was cancelled.

    Next step: nothing: the engine, or a close, asked for it.
    """


class TransferStuck(TransferError):
    """The read did not end by its deadline (R5)."""

    reason = "TRANSFER_STUCK"
    code = "DEADLINE_EXCEEDED"


class DataLoss(TransferError):
    """The bytes that were read do not match the source's checksums (integrity mode). Values: plane, source_rank, place,
    unit, source_block, destination_blocks, expected, computed: of the first mismatch; mismatches: how many."""

    reason = "DATA_LOSS"
    code = "DATA_LOSS"


class PromptMismatch(TransferError):
    """The publication is of another prompt than the reader's: a router has confused two requests. Its bytes do not
    count, and it was not declined. Values: request_id, tokens, reader; source_request_id, engine_id, publication,
    marked, the ends of the source's marks."""

    reason = "PROMPT_MISMATCH"
    code = "FAILED_PRECONDITION"


class PromptUnmarked(TransferError):
    """No mark of the source covers the tokens to read, and the reader's `prompt_check` is "require". Values: those of
    `PromptMismatch`."""

    reason = "PROMPT_UNMARKED"
    code = "FAILED_PRECONDITION"


class NixlMissing(KvferryError):
    """NIXL is not installed, or cannot be loaded.

    Next step: install 'kvferry[nixl]', for the CUDA version of torch; `problem` says why what is installed
    cannot be loaded.
    """


class NixlError(KvferryError):
    """A call to NIXL failed. It does not prove that a read which was posted has stopped writing. Values: call, peer,
    problem."""

    reason = "NIXL_FAILED"
    code = "ABORTED"

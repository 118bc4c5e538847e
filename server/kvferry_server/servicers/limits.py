"""The limits on requests and answers. The proto files state those on requests."""

from __future__ import annotations

from kvferry import _prompt
from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry.geometry import blocks
from kvferry_server.domain.limits import MAX_RANK_BYTES

MAX_TEXT = 256  # Bytes of a name in a request, such as an engine_id or request_id
MAX_AGENT_NAME = 512  # Bytes of an agent's name, which has an engine_id, an incarnation and more
MAX_METADATA = 2 << 20  # Bytes of a NIXL agent's metadata
MAX_IDENTITY = 256  # Entries of an identity
MAX_GROUPS = 256  # Groups of one step of a publication
# Of one step of a publication: runs of block ids, unfinished blocks, and their complete layers.
MAX_RUNS, MAX_UNFINISHED, MAX_LAYERS = blocks.MAX_RUNS, blocks.MAX_UNFINISHED, blocks.MAX_LAYERS
MAX_MARKS = _prompt.MAX_MARKS  # Marks of a publication's prompt, in all its steps
MAX_PLACE = 2**63 - 1  # Of an input in a prompt, in tokens
MAX_INPUTS = 256  # Inputs of a question's prompt
# Seconds that an asker waits for an answer.
MAX_ASK_WAIT = 2.0
DEFAULT_ASK_WAIT = 0.2
MAX_SECONDS = 1e9  # Seconds of a duration in a request
MAX_NOTIFICATIONS = 1024  # Notifications in one Notify
MAX_SNAPSHOT_NAME = 64  # Bytes of a snapshot's name
MAX_ACKNOWLEDGED = 1 << 16  # Releases that one notification acknowledges
MAX_PAGE_SUMS = 1 << 17  # Checksums in one notification
MAX_PAGE_PARTS = 1024  # Parts in one notification of checksums
MAX_ASKED_SUMS = 1 << 19  # Checksums that one ReadChecksums asks for: 2 MiB
MAX_ASKED_PLANES = 4096  # Planes named in one ReadChecksums, and its queries. Each is looked up.
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 64 * 1024  # Bytes of an answer; the margin is for what gRPC adds
MAX_RELEASED_READS = 256  # Reads that a `released` event lists
DEFAULT_PAGE_SIZE = 100  # Entries of a listing's page by default
MAX_PAGE_SIZE = 1000  # Entries of a listing's page
MAX_LOOKS = 1 << 14  # Entries that one filtered page looks at, with their reads: a few milliseconds on the event loop
MAX_PAGE_TOKEN = 4096  # Characters of a page token
LISTING_PAGE_BYTES = 1 << 18  # Bytes of a listing's page, made on the event loop; one entry may be larger
ENGINE_PAGE_BYTES = MAX_RANK_BYTES  # Bytes of the ranks in one GetEngine answer; one rank may be larger
MAX_PLAN_BYTES = 3 << 20  # Bytes of the plans in one PlanRead answer
MAX_INLINE_BYTES = 16 * 1024  # Bytes of a message that the event loop decodes; larger ones go to the worker thread
# Bytes of a Handshake request up to which its geometry is looked up by its digest, in a tenth of a millisecond on the
# event loop; larger ones are always compared.
MAX_DIGESTED_BYTES = 64 * 1024
# Registrations and Watches of ranks that are relayed at once. Each relayed call has a connection, and so a file, of its
# own: `RESERVED_FILES` of the node server has room for 256. A host or identity gets at most half.
MAX_RELAYED_CALLS = 192
# Declines that are sent on at once. Every bearer of a reference sends declines, and ranks must not wait for them.
MAX_RELAYED_DECLINES = 64
READ_BYTES = 1 << 20  # Bytes of blocks after which an answer to ReadBlocks takes no more steps
READ_STEPS = 1024  # Steps after which an answer to ReadBlocks takes no more

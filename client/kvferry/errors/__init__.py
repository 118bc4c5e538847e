"""All errors of kvferry, and the only table that maps them to status codes and back.

    KvferryError
    ├── InvalidInput (ValueError)      an argument is wrong; repeating will not help
    │   ├── InvalidField
    │   ├── DeadlineRequired
    │   ├── BadGeometry
    │   ├── LayoutMismatch
    │   ├── BadReference
    │   ├── BadBlock
    │   ├── BlocksShort
    │   └── PartiesMismatch
    ├── WrongState                     the call comes at the wrong time; the message says what to do first
    ├── Refused                        the peer rejects the request and gives a reason
    │   ├── Incompatible               .mismatches names every field with both values
    │   ├── WrongKey
    │   ├── WrongSession
    │   ├── WrongIdentity
    │   ├── NotAllowed                 the node server's policy does not let this caller do it
    │   ├── CacheDiffers
    │   ├── EngineIdInUse              retry after .retry_after seconds
    │   ├── PeerRestarted
    │   ├── LeaseEnded
    │   ├── NotPublished
    │   ├── PublicationAborted
    │   ├── RouterKeyUsed
    │   ├── ContractDiffers
    │   ├── WatchTakenOver
    │   ├── RelayLoop
    │   ├── AgentsWithheld             the home gives no agents to a caller without a reference
    │   ├── HomeNotAllowed             the client's allow-list does not cover the home of a reference
    │   └── NotImplementedHere
    ├── NotFound
    │   ├── EngineUnknown
    │   ├── EngineNotListed            the directory does not list it
    │   ├── PublicationStale
    │   └── PublicationReleased
    ├── Unavailable                    retry as is
    │   ├── EngineIncomplete
    │   ├── HomeRecovering
    │   ├── ServerDraining
    │   ├── Unreachable
    │   ├── DirectoryUnavailable
    │   └── LimitReached
    ├── MessageTooLarge                .values has the size and the limit
    ├── PublicationTimeout (TimeoutError)
    ├── BadAgentMetadata
    ├── TransferError                  a read failed; .quiet says whether its blocks may be reused
    │   ├── TransferFailed
    │   ├── TransferExpired
    │   ├── TransferCancelled
    │   ├── TransferStuck
    │   ├── DataLoss                   integrity mode: the bytes do not match the source's checksums
    │   ├── PromptMismatch             the publication is of another prompt
    │   └── PromptUnmarked             nothing says whose prompt it is, and the client requires that
    ├── NixlError                      a call to NIXL failed
    ├── NixlMissing                    NIXL is not installed
    ├── WrongThread                    a reading agent was used by a thread that does not own it
    ├── ForkedClient                   a client was used in a child of the process that made it
    ├── Closed                         a closed client, cache or session was used
    └── InternalError

Messages are for people. Programs use `.reason`, and `.values`, which has every dynamic part of the message.
"""

from __future__ import annotations

from kvferry.errors._arguments import (
    BadBlock,
    BadGeometry,
    BadReference,
    BlocksShort,
    DeadlineRequired,
    InvalidField,
    InvalidInput,
    LayoutMismatch,
    PartiesMismatch,
)
from kvferry.errors._base import KvferryError
from kvferry.errors._incompatible import Incompatible, Mismatch
from kvferry.errors._peers import (
    AgentsWithheld,
    BadAgentMetadata,
    CacheDiffers,
    ContractDiffers,
    DirectoryUnavailable,
    EngineIdInUse,
    EngineIncomplete,
    EngineNotListed,
    EngineUnknown,
    HomeNotAllowed,
    HomeRecovering,
    InternalError,
    LeaseEnded,
    LimitReached,
    MessageTooLarge,
    NotAllowed,
    NotFound,
    NotImplementedHere,
    NotPublished,
    PeerRestarted,
    PublicationAborted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    Refused,
    RelayLoop,
    RouterKeyUsed,
    ServerDraining,
    Unavailable,
    Unreachable,
    WatchTakenOver,
    WrongIdentity,
    WrongKey,
    WrongSession,
)
from kvferry.errors._rebuild import from_name, from_reason
from kvferry.errors._state import Closed, ForkedClient, WrongState, WrongThread
from kvferry.errors._transfers import (
    DataLoss,
    NixlError,
    NixlMissing,
    PromptMismatch,
    PromptUnmarked,
    TransferCancelled,
    TransferError,
    TransferExpired,
    TransferFailed,
    TransferStuck,
)

__all__ = [
    "AgentsWithheld",
    "BadAgentMetadata",
    "BadBlock",
    "BadGeometry",
    "BadReference",
    "BlocksShort",
    "CacheDiffers",
    "Closed",
    "ContractDiffers",
    "DataLoss",
    "DeadlineRequired",
    "DirectoryUnavailable",
    "EngineIdInUse",
    "EngineIncomplete",
    "EngineNotListed",
    "EngineUnknown",
    "ForkedClient",
    "HomeNotAllowed",
    "HomeRecovering",
    "Incompatible",
    "InternalError",
    "InvalidField",
    "InvalidInput",
    "KvferryError",
    "LayoutMismatch",
    "LeaseEnded",
    "LimitReached",
    "MessageTooLarge",
    "Mismatch",
    "NixlError",
    "NixlMissing",
    "NotAllowed",
    "NotFound",
    "NotImplementedHere",
    "NotPublished",
    "PartiesMismatch",
    "PeerRestarted",
    "PromptMismatch",
    "PromptUnmarked",
    "PublicationAborted",
    "PublicationReleased",
    "PublicationStale",
    "PublicationTimeout",
    "Refused",
    "RelayLoop",
    "RouterKeyUsed",
    "ServerDraining",
    "TransferCancelled",
    "TransferError",
    "TransferExpired",
    "TransferFailed",
    "TransferStuck",
    "Unavailable",
    "Unreachable",
    "WatchTakenOver",
    "WrongIdentity",
    "WrongKey",
    "WrongSession",
    "WrongState",
    "WrongThread",
    "from_name",
    "from_reason",
]

for _name in __all__:
    # Tracebacks, pickles and documents name them by the module that users import them from.
    globals()[_name].__module__ = __name__

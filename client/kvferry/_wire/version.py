"""Versions: which releases of kvferry work together (PROTOCOL, Versions). The only place that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry import __version__
from kvferry.errors import ContractDiffers
from kvferry.v1 import kv_transfer_pb2 as pb

CONTRACT_REVISION = 2
"""The revision of kvferry.v1 in protos/. Raised with the first addition to the protos after each release."""

OLDEST_REVISION = 2
"""The oldest revision that this release works with. Raised only where working with an older one would cost more than
to upgrade a whole fleet at once."""

CALLER = "the caller"

MAX_RELEASE = 64
"""Most characters of a peer's release in a message."""


class Speaks(Protocol):
    """A message with its sender's version."""

    @property
    def version(self) -> pb.Version: ...


@dataclass(frozen=True, slots=True)
class Version:
    """What a program says of the contract that it speaks.

    Attributes:
        revision: of the contract; 0: it says none, as kvferry before 0.2.0.
        oldest: the oldest revision that it works with; 0: it leaves that to the other side.
        release: of kvferry, or what another program calls itself; for people.
    """

    revision: int
    oldest: int
    release: str

    @classmethod
    def from_proto(cls, message: pb.Version | pb.RelayVersion) -> Version:
        """Decode it; an absent message says nothing."""
        # Peers may say anything, and people read it.
        return cls(message.contract_revision, message.oldest_revision, ascii(message.release[:MAX_RELEASE])[1:-1])

    def to_proto(self) -> pb.Version:
        """Encode it."""
        return pb.Version(contract_revision=self.revision, oldest_revision=self.oldest, release=self.release)

    def works_with(self, other: Version) -> bool:
        """Whether neither is too old for the other."""
        return self.revision >= other.oldest and other.revision >= self.oldest

    def __str__(self) -> str:
        if not self.revision:
            return "says no revision of the contract, like kvferry before 0.2.0"
        return f"speaks revision {self.revision} of the contract (release {self.release or 'not said'})"


OURS = Version(CONTRACT_REVISION, OLDEST_REVISION, __version__)
OURS_ENCODED = OURS.to_proto()
"""What requests and answers carry; to be copied, never changed."""
OURS_AS_RELAY = pb.RelayVersion(contract_revision=OURS.revision, oldest_revision=OURS.oldest, release=OURS.release)
"""What a relay adds to the versions of the messages that it passes on."""


def introduce(request: Speaks) -> None:
    """Put this release's version into a request."""
    request.version.MergeFrom(OURS_ENCODED)


def check_together(one: Version, who: str, other: Version, whom: str) -> None:
    """Raise `ContractDiffers` unless two programs work together; `who` and `whom` name them in the message."""
    if one.works_with(other):
        return
    older = who if one.revision <= other.revision else whom
    message = f"{who} {one}, and {whom} {other}: they do not work together. Upgrade {older}"
    if who == CALLER and not one.revision:
        message += f', or, if it is a program of yours, send "version": {{"contract_revision": {CONTRACT_REVISION}}}'
    raise ContractDiffers(
        message,
        party=who,
        party_revision=one.revision,
        party_release=one.release,
        other=whom,
        other_revision=other.revision,
        other_release=other.release,
    )


def check_caller(message: pb.Version, relayed_by: str = "") -> Version:
    """Check at a node server who calls it, and who relayed the call. Returns the caller's version.

    Raises:
        ContractDiffers: one of them and this node server do not work together.
    """
    here = "this node server"
    if relayed_by:
        check_together(Version.from_proto(message.relay), "the relay", OURS, here)
    caller = Version.from_proto(message)
    check_together(caller, CALLER, OURS, here)
    return caller


def check_server(message: pb.Version, address: str, us: str = "this client") -> None:
    """Check who answered at an address, and who relayed the answer.

    Raises:
        ContractDiffers: one of them and this program do not work together.
    """
    check_together(Version.from_proto(message), f"the node server {address}", OURS, us)
    if message.HasField("relay"):
        check_together(Version.from_proto(message.relay), f"the relay {address}", OURS, us)

"""Decides which releases of kvferry work together (PROTOCOL, Versions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry import __version__
from kvferry.errors import ContractDiffers
from kvferry.v1 import kv_transfer_pb2 as pb

CONTRACT_REVISION = 2
"""The revision of kvferry.v1 in protos/. Raised with the first addition to the protos after each release."""

OLDEST_REVISION = 2
"""The oldest revision that this release works with. To raise it means to upgrade a whole fleet at once."""

CALLER = "the caller"

MAX_RELEASE = 64
"""Most characters of a peer's release in a message."""


@dataclass(frozen=True, slots=True)
class Version:
    """A program's statement about the contract that it speaks.

    Attributes:
        revision: of the contract; 0: not stated, as by kvferry before 0.2.0.
        oldest: the oldest revision that the program works with; 0: the other side decides.
        release: of kvferry, or the name of another program; for people.
    """

    revision: int
    oldest: int
    release: str

    @classmethod
    def from_proto(cls, message: pb.Version | pb.RelayVersion) -> Version:
        # Peers may send any text as their release, and people read it.
        return cls(message.contract_revision, message.oldest_revision, ascii(message.release[:MAX_RELEASE])[1:-1])

    def to_proto(self) -> pb.Version:
        return pb.Version(contract_revision=self.revision, oldest_revision=self.oldest, release=self.release)

    def works_with(self, other: Version) -> bool:
        """Whether neither program is too old for the other."""
        return self.revision >= other.oldest and other.revision >= self.oldest

    def __str__(self) -> str:
        if not self.revision:
            return "says no revision of the contract, like kvferry before 0.2.0"
        return f"speaks revision {self.revision} of the contract (release {self.release or 'not said'})"


OURS = Version(CONTRACT_REVISION, OLDEST_REVISION, __version__)
OURS_ENCODED = OURS.to_proto()
"""The version in requests and answers; to be copied, never changed."""
OURS_AS_RELAY = pb.RelayVersion(contract_revision=OURS.revision, oldest_revision=OURS.oldest, release=OURS.release)
"""The version that a relay adds to the messages that it passes on."""


def introduce(request: Any) -> None:
    """Put this release's version into a request that has one."""
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
    """Check, at a node server, the versions of a call's relay and caller; return the caller's. Raises
    `ContractDiffers`."""
    here = "this node server"
    if relayed_by:
        check_together(Version.from_proto(message.relay), "the relay", OURS, here)
    caller = Version.from_proto(message)
    check_together(caller, CALLER, OURS, here)
    return caller


def check_server(message: pb.Version, address: str, us: str = "this client") -> None:
    """Check the versions of the node server that answered, and of the answer's relay; raises `ContractDiffers`."""
    check_together(Version.from_proto(message), f"the node server {address}", OURS, us)
    if message.HasField("relay"):
        check_together(Version.from_proto(message.relay), f"the relay {address}", OURS, us)

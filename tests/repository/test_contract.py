"""The contract for authors in other languages: what the protos promise is what the server does, and stays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvferry._prompt import MARK_BYTES
from kvferry._wire import authority, reference, version
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import BadGeometry
from kvferry.geometry import Group, GroupKind
from kvferry.v1 import admin_pb2, errors_pb2, geometry_pb2, introspection_pb2, kv_transfer_pb2
from kvferry_server.domain.limits import MAX_CHECKSUM_PAGES, MAX_HEADER_BYTES, MAX_PAYLOAD, MAX_RANK_BYTES, Limits
from kvferry_server.servicers import limits
from scripts import rpc_reference
from tests.support.repository import ROOT

MODULES = (kv_transfer_pb2, introspection_pb2, admin_pb2, geometry_pb2, errors_pb2)
FILES: list[Any] = [module.DESCRIPTOR for module in MODULES]
SERVICES = [service for file in FILES for service in file.services_by_name.values()]
BUF = ROOT / "tests" / "support" / "nodejs" / "node_modules" / ".bin" / "buf"
RELEASED = sorted((ROOT / "protos" / "released").glob("*.binpb"))
HOME = Limits()


def comments() -> dict[str, str]:
    """The comment of every field of the protos, on one line, by message and field."""
    files = [(rpc_reference.PROTOS / f"{name}.proto").read_text() for name in rpc_reference.FILES]
    found = [declared for text in files for declared in rpc_reference.declarations(text)[1]]
    return {
        f"{declared.name}.{member.name}": " ".join(member.comment.split())
        for declared in found
        for member in declared.members
    }


COMMENTS = comments()

MIB, KIB = 1 << 20, 1 << 10
STATED = {
    "Group.name": f"at most {128} bytes",
    "Plane.group": f"at most {128} bytes",
    "Plane.layer": f"at most {256} bytes",
    "Plane.component": f"at most {64} bytes",
    "Plane.format": f"at most {MAX_RANK_BYTES / MIB} MiB",
    "Agent.name": f"at most {limits.MAX_AGENT_NAME} bytes",
    "Agent.metadata": f"at most {limits.MAX_METADATA // MIB} MiB",
    "Agent.metadata_sha256": "32 bytes",
    "RankGeometry.planes": f"at most {MAX_RANK_BYTES / MIB} MiB",
    "EngineGeometry.identity": f"At most {limits.MAX_IDENTITY} entries",
    "EngineGeometry.groups": f"at most {MAX_HEADER_BYTES // KIB} KiB",
    "EngineGeometry.ranks": f"at most {HOME.ranks},",
    "EngineRef.engine_id": f"at most {limits.MAX_TEXT} bytes",
    "RegisterCacheRequest.session_secret": f"{authority.SECRET_BYTES} random bytes",
    "RegisterCacheRequest.agent_key": f"{authority.AGENT_KEY_BYTES} random bytes",
    "RegisterCacheRequest.identity": f"At most {limits.MAX_IDENTITY} entries",
    "RegisterCacheRequest.home": f"at most {limits.MAX_TEXT} bytes",
    "HandshakeRequest.reference": f"at most {reference.MAX_LENGTH} bytes",
    "HandshakeRequest.identity": f"At most {limits.MAX_IDENTITY} entries",
    "HandshakeRequest.groups": f"at most {MAX_MESSAGE_BYTES // MIB} MiB",
    "ReadBlocksRequest.reference": f"at most {reference.MAX_LENGTH} bytes",
    "ReadBlocksRequest.expected_reads": f"at most {HOME.raised_reads}:",
    "NotifyRequest.notifications": f"at most {limits.MAX_NOTIFICATIONS}.",
    "Publish.request_id": f"at most {limits.MAX_TEXT} bytes",
    "Publish.groups": f"at most {limits.MAX_GROUPS}, with at most {limits.MAX_RUNS} runs",
    "Publish.expected_reads": f"at most {HOME.reads}.",
    "Publish.payload": f"at most {MAX_PAYLOAD // KIB} KiB",
    "Publish.marks": f"at most {limits.MAX_MARKS} in all its steps",
    "PromptMark.digest": f"{MARK_BYTES} bytes",
    "Reference.marks": f"at most {reference.MAX_REFERENCE_MARKS} of them",
    "Unfinished.groups": f"At most {limits.MAX_UNFINISHED} blocks",
    "Unfinished.layers": f"at most {limits.MAX_LAYERS}, each of at most {limits.MAX_TEXT} bytes",
    "GroupBlocks.run_starts": f"at most {limits.MAX_RUNS} ",
    "PublishChecksums.checksums": (
        f"at most {limits.MAX_PAGE_PARTS} with together {limits.MAX_PAGE_SUMS} sums. "
        f"A plane has at most {MAX_CHECKSUM_PAGES} "
    ),
    "Checksums.sums": f"at most {limits.MAX_PAGE_SUMS} ",
    "ReleasedAck.publications": f"at most {limits.MAX_ACKNOWLEDGED}.",
    "Resync.snapshot": f"at most {limits.MAX_SNAPSHOT_NAME} bytes",
    "ReadDone.reports": f"at most {HOME.ranks}.",
    "Decline.reference": f"at most {reference.MAX_LENGTH} bytes",
    "Decline.relayed_by": f"at most {limits.MAX_TEXT} bytes",
    "Ask.reference": f"at most {reference.MAX_LENGTH} bytes",
    "Ask.engine_reference": f"at most {reference.MAX_LENGTH} bytes",
    "Ask.prompt": f"at most {MAX_NOTIFY_BYTES // MIB} MiB",
    "Ask.wait": f"at most {limits.MAX_ASK_WAIT:.0f} seconds. Zero: {limits.DEFAULT_ASK_WAIT * 1000:.0f} ms",
    "Prompt.token_ids": f"at most {MAX_NOTIFY_BYTES // MIB} MiB",
    "Prompt.adapter": f"At most {limits.MAX_TEXT} bytes",
    "Prompt.inputs": f"at most {limits.MAX_INPUTS}.",
    "PromptInput.identifier": f"1 to {limits.MAX_TEXT} bytes",
    "ReadChecksumsRequest.queries": (f"at most {limits.MAX_ASKED_SUMS} sums of {limits.MAX_ASKED_PLANES} planes"),
    "ListEnginesRequest.page_size": f"at most {limits.MAX_PAGE_SIZE}. 0 means {limits.DEFAULT_PAGE_SIZE}",
    "ListRequestsRequest.page_token": f"at most {limits.MAX_PAGE_TOKEN} bytes",
    "ListRequestsRequest.request_id": f"at most {limits.MAX_TEXT} bytes",
    "ListTransfersRequest.reader_engine_id": f"at most {limits.MAX_TEXT} bytes",
    "PlanReadRequest.ranks": f"at most {HOME.ranks}.",
}
"""What the comment of a field says of its limit, from the constant that the server compares with."""


@pytest.mark.parametrize("field", STATED)
def test_stated_limits_are_those_of_the_server(field: str) -> None:
    assert STATED[field] in COMMENTS[field]


def test_group_name_has_the_stated_limit() -> None:
    Group("n" * 128, GroupKind.TOKENS, 16, 8)
    with pytest.raises(BadGeometry):
        Group("n" * 129, GroupKind.TOKENS, 16, 8)


LIMIT = re.compile(r"at most [\d.]+|\d+ (random )?bytes", re.IGNORECASE)


def requests() -> Iterator[Descriptor]:
    """Every message that a request may hold."""
    left: list[Any] = [method.input_type for service in SERVICES for method in service.methods]
    seen: set[str] = set()
    while left:
        message = left.pop()
        if message.full_name not in seen and message.file.package == "kvferry.v1":
            seen.add(message.full_name)
            left += [field.message_type for field in message.fields if field.message_type is not None]
            if not message.GetOptions().map_entry:
                yield message


def test_growing_fields_of_requests_state_their_limits() -> None:
    grows = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}
    silent = [
        f"{message.name}.{field.name}"
        for message in requests()
        for field in message.fields
        if (field.is_repeated or field.type in grows)
        and not re.search(
            r"at most [\d.]+|\d+ (random )?bytes", COMMENTS[f"{message.name}.{field.name}"], re.IGNORECASE
        )
    ]
    assert silent == []


def test_calls_all_state_whether_they_may_be_repeated() -> None:
    levels = {}
    for service in SERVICES:
        for method in service.methods:
            options = descriptor_pb2.MethodDescriptorProto()
            method.CopyToProto(options)
            levels[f"{service.name}.{method.name}"] = options.options.idempotency_level
    unknown = descriptor_pb2.MethodOptions.IDEMPOTENCY_UNKNOWN
    assert [name for name, level in levels.items() if level == unknown] == []
    safe = {name for name, level in levels.items() if level == descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS}
    assert {name for name in levels if name.startswith("Introspection.")} <= safe
    assert not {name for name in safe if name.startswith("Admin.")}
    assert not {"KVTransfer.Notify", "KVTransfer.ReadBlocks", "KVTransfer.Watch"} & safe


def test_proto_files_all_have_one_go_package() -> None:
    files = [descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb) for file in FILES]
    assert {file.options.go_package for file in files} == {"kvferry/v1;kvferryv1"}


def test_contract_revision_rises_with_additions_after_a_release() -> None:
    assert len(RELEASED) <= version.CONTRACT_REVISION <= len(RELEASED) + 1


def test_released_contracts_can_be_read_without_this_repository() -> None:
    for path in RELEASED:
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
            untyped: Any = pool
            untyped.AddSerializedFile(file.SerializeToString())
        assert pool.FindServiceByName("kvferry.v1.KVTransfer").methods


CHANGES = {
    "nothing": ("", "", ""),
    "an addition": ("message Acknowledged {}", "message Acknowledged {\n  // more.\n  bool more = 1;\n}", ""),
    "a field that is gone": ("  uint64 high_water = 2;", "", "high_water"),
    "a number that is another": ("  bytes read_id = 3;", "  bytes read_id = 13;", "read_id"),
    "a type that is another": ("  uint64 high_water = 2;", "  string high_water = 2;", "high_water"),
    "a call that is gone": ("  rpc Notify(", "  rpc Notified(", "Notify"),
}
"""Changes of a proto: what is replaced, by what, and what is complained about."""


@pytest.mark.slow
@pytest.mark.skipif(not BUF.exists(), reason="tests/support/nodejs is not installed: npm was missing at set-up")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_break_callers_of_the_last_release_are_found(change: str, tmp_path: Path) -> None:
    for name in ("protos", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    proto = tmp_path / "protos" / "kvferry" / "v1" / "kv_transfer.proto"
    old, new, complaint = CHANGES[change]
    text = proto.read_text()
    assert old in text
    proto.write_text(text.replace(old, new) if old else text)
    command = ["bash", str(tmp_path / "scripts" / "breaking.sh")]
    env = {**os.environ, "BUF": str(BUF)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert bool(done.returncode) == bool(complaint), done.stdout + done.stderr
    assert complaint in done.stdout

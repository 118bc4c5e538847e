"""Channels, references, statuses, and the encoding of values as protobuf messages. Used by client and server."""

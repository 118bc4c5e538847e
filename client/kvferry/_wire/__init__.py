"""What crosses the network: channels, references, statuses, and values as protobuf messages. Used by both sides."""

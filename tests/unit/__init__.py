"""The pure parts: no process, no network, no NIXL."""

"""The command `kvferry`."""

"""The node server, folder by folder."""

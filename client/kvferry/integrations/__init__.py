"""Connectors for inference engines, each in a folder of its own over public modules of kvferry, and announced to its
engine by an entry point in pyproject.toml. The rest of kvferry does not import them."""

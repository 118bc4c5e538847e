"""Connectors for inference engines. The rest of kvferry does not import them."""

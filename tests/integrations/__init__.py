"""Integrations into engines."""

"""Geometry: from tensors and from files."""

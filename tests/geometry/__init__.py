"""Geometry: from tensors, from files, and over the wire."""

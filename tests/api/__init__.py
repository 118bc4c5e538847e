"""Caches and clients as their users see them: what is handed to them is copied, checked, and refused while in use."""

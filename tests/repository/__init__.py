"""The repository itself: imports, documents, exports, and these tests."""

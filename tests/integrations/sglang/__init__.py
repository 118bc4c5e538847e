"""The backend for SGLang."""

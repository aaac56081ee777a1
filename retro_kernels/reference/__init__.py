"""Plain PyTorch, any float type: the definition every other backend is judged by. Imports nothing but torch."""

from __future__ import annotations


def unavailable() -> str | None:
    """Why this machine cannot run the backend: never, torch is enough."""
    return None

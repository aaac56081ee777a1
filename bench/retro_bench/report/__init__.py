"""Rendering of records: terminal, Markdown, HTML."""

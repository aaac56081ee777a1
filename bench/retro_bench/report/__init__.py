"""Rendering of records: terminal, Markdown, HTML, PNG."""

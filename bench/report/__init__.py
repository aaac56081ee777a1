"""Rendering of records: terminal, Markdown, HTML, PNG. Nothing here measures."""

"""Comparison of two trees, or of two files of records."""

"""Demonstrations of RPT that two cores can run: `retro-model rpt cards`, `retro-model rpt text`."""

"""`retro-model rpt cards`, a demonstration of RPT for two cores."""

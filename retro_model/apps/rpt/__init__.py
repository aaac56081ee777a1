"""`retro-model rpt cards`, the demonstration of RPT that two cores can run."""

"""Mutation testing, `python -m tools.mutants`. explained.json says why no test can notice a survivor."""

"""A page and a command that show what a trained model retrieves, and what it gains by that."""

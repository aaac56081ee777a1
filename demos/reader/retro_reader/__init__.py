"""A page and a command that show a trained model's neighbours and the gain of retrieval."""

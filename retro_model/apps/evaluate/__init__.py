"""Commands that score a trained model, or look up neighbours for a data set."""

"""`retro-model lm-eval`: run the evaluation harness on a trained model."""

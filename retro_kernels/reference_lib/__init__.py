"""What the ops' definitions in plain PyTorch share. Imports nothing but torch."""

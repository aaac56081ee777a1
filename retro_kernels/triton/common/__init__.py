"""What kernels of several ops share: loads, products, position logits, softmax, dropout, merge, launches."""

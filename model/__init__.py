"""What a quantized model is: graph, grid, bit-planes, pruning."""

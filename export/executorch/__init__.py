"""The target `executorch`: explicit quantize and dequantize operators, for ExecuTorch with XNNPACK."""

"""The target `onnx`: standard operators and packed bit-planes, for ONNX Runtime."""

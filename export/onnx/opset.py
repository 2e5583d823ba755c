"""The versions that files are written in."""

# ONNX Runtime 1.20 and later know both; onnx's own newest are refused even by runtimes of the same month.
OPSET = 21
IR_VERSION = 10

"""A global model and an assignment in; `.onnx` or `.pte` out, verified."""

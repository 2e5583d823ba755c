"""What runs on the board: engine, local training, federation session. No torch, no onnx, no server code."""

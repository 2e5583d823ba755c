"""The client: the process on a board that takes part in a federation. No torch, no onnx, no server code.

A client is a participant as the server knows it; a board is the machine that it runs on.
"""

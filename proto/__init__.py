"""The wire: `fedmpq/v1/*.proto` and the stubs generated from it (`python -m fedmpq.proto.generate`).

Messages are imported from here (`from fedmpq.proto import graph_pb2`). gRPC stubs (`*_pb2_grpc`) are not:
they need grpcio, which a reader of messages may lack; import those from `fedmpq.proto.fedmpq.v1`.
"""

from .fedmpq.v1 import administration_pb2, federation_pb2, graph_pb2, payload_pb2

__all__ = ["administration_pb2", "federation_pb2", "graph_pb2", "payload_pb2"]

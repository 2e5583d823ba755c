"""Protobuf package `fedmpq`."""

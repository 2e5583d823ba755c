"""What the project runs on itself beside tests and benches: wheels, the demo, generated code, ARM boards."""

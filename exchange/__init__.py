"""What crosses between server and board: assignment, update, calibration, and their bytes."""

"""The algorithm on the server's side: deal, quantize, merge, average, evaluate. Pure functions."""

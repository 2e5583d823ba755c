"""Runs in the browser: what they did and what they do now, of a server and of simulations."""

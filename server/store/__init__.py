"""Every durable fact of the server: records of them, the protocol they are kept behind, and its SQL."""

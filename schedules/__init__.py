"""How an operation runs on a device: one workload a file, no model in it."""

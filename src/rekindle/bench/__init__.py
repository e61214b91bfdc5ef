"""The benchmark: workloads of the shape that agents have, sent to this server and its peers."""

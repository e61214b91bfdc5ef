"""The parts that the disk tier and the shared store have in common."""

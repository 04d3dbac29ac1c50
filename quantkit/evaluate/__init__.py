"""Whether the exported model is right (parity), and what quantization costs (cost)."""

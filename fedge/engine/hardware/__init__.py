"""What the machine offers: devices, memory, threads."""

"""What `fedge bench --json` printed, and the pages made of it."""

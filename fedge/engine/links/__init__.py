"""Links: what carries the asks of a round to clients, and the replies back."""

"""What codecs cost and save, and what liars do to combining rules: docs/uploads.md is made from these results."""

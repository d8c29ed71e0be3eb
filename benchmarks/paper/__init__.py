"""The paper's experiments, what was measured, and the page that shows it."""

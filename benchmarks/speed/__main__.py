"""`python -m benchmarks.speed`: write the tables of this folder's README and of the project's from the JSON files."""

from benchmarks.speed.page import write

write()

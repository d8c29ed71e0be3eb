"""`python -m benchmarks.speed`: write the tables of this folder's README, the project's and docs/speed.md."""

from benchmarks.speed import page, table

page.write()
table.write()

"""`python -m fedge` is `fedge`."""

from fedge.cli import main

if __name__ == "__main__":
    main()

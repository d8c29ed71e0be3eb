"""What can be wrong with the files of a data set."""


class DataError(ValueError):
    """One line that names the file, says what is wrong with it, and what to do."""

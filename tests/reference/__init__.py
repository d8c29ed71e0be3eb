"""Plain float64 loops, written from the mathematics alone, that the library is tested against."""

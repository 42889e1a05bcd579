"""A stub of the compiler's package: only its files and its version are looked at."""

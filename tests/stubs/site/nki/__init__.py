"""A stub of NKI's package: only its files and its version are looked at."""
